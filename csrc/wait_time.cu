// How long a stream waits for another: one launch before the wait, and one after it.
#include "common.cuh"

struct WaitTimeParams {
    u64* began;   // when the last wait began, ns
    u64* waited;  // the time since then is added, ns; null: a wait begins
};

extern "C" __global__ void __launch_bounds__(THREADS) wait_time(const __grid_constant__ WaitTimeParams p) {
    follow();
    if (threadIdx.x) return;
    u64 now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    if (p.waited) {
        *p.waited += now - *p.began;
    } else {
        *p.began = now;
    }
}
