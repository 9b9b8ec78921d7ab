"""Triton's interpreter, which runs kernels on this CPU. To be imported before Triton, in a process of its own: Triton
decides when it is imported whether to interpret."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def _with_index(tensor: Any, scope: Any, patch: Any = interpreter._patch_lang_tensor) -> None:
    patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


def _product(self: Any, a: Any, b: Any, *more: Any, own: Any = interpreter.InterpreterBuilder.create_dot) -> Any:
    wide = (self.create_fp_ext(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
    return own(self, *wide, *more)


interpreter._patch_lang_tensor = _with_index  # Triton 3.6 calls int() on an array, which NumPy 2.5 refuses
interpreter.InterpreterBuilder.create_dot = _product  # Triton 3.9 multiplies the codes of bfloat16 numbers
