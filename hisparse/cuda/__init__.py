"""The CUDA swap-in: kernels from csrc/, compiled at first use, behind the protocol of `hisparse.swap_in`."""

from hisparse.cuda.swap_in import CudaSwapIn, CudaSwapInPlan

__all__ = ["CudaSwapIn", "CudaSwapInPlan"]
