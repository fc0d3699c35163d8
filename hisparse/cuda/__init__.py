"""The CUDA backend: kernels from csrc/, compiled at first use, and streams, behind the protocols of the CPU backend."""

from hisparse.cuda.copy_stream import CudaCopyEvent, CudaCopyStream
from hisparse.cuda.swap_in import CudaSwapIn, CudaSwapInPlan

__all__ = ["CudaCopyEvent", "CudaCopyStream", "CudaSwapIn", "CudaSwapInPlan"]
