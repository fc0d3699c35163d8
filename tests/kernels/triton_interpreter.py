"""Triton's interpreter, which runs kernels on a CPU, made to round as a GPU does and to run with any numpy.

A plugin of pytest: it is imported, with TRITON_INTERPRET=1 in the environment, before any module that has kernels.
"""

import os

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle

assert os.environ.get("TRITON_INTERPRET") == "1"

_TORCH = {
    tl.float32: torch.float32,
    tl.bfloat16: torch.bfloat16,
    tl.float16: torch.float16,
    tl.float8e4nv: torch.float8_e4m3fn,
}
_SIGNED = {1: np.int8, 2: np.int16, 4: np.int32}


def _convert(data: np.ndarray, source: tl.dtype, target: tl.dtype, rounding_mode: object) -> np.ndarray:
    """The interpreter's own cuts off."""
    whole = torch.from_numpy(np.ascontiguousarray(data).view(_SIGNED[data.itemsize]).copy()).view(_TORCH[source])
    converted = whole.to(torch.float32).to(_TORCH[target])
    bits = converted.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[converted.itemsize]).numpy()
    return bits.view(getattr(np, f"uint{8 * converted.itemsize}"))


_patch_lang_tensor = interpreter._patch_lang_tensor


def _patch(tensor: object, scope: object) -> None:
    """numpy 2.4 makes no integer of an array of one element."""
    _patch_lang_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))  # type: ignore[attr-defined]


interpreter._convert_float = _convert
interpreter._patch_lang_tensor = _patch

_create_dot = interpreter.InterpreterBuilder.create_dot


def _dot(self: object, a: TensorHandle, b: TensorHandle, d: TensorHandle, *rest: object) -> TensorHandle:
    """The interpreter's own multiplies the bits of bfloat16 as integers."""
    widened = (
        TensorHandle(_convert(x.data, tl.bfloat16, tl.float32, None).view(np.float32), tl.float32)
        if x.dtype == tl.bfloat16
        else x
        for x in (a, b)
    )
    return _create_dot(self, *widened, d, *rest)


interpreter.InterpreterBuilder.create_dot = _dot
