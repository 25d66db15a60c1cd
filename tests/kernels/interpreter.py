"""What the tests need around Triton's interpreter.

The interpreter keeps bfloat16 as raw 16-bit integers and would multiply those in `tl.dot`; here the bits
are widened to float32 first, which is what the hardware's products do.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

from kernels.plan import ALWAYS
from kernels.triton_backend import TritonBackend

needs_interpreter = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1",
    reason="a GPU is here: scripts/gpu_check.py checks the kernels",
)


@contextmanager
def bfloat16_products() -> Iterator[None]:
    """Let `tl.dot` take bfloat16 under the interpreter."""
    plain = interpreter.InterpreterBuilder.create_dot

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        bits = handle.data.astype(np.uint32) << np.uint32(16)
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return plain(self, widened(a), widened(b), *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
        yield


def interpreted_backend() -> TritonBackend:
    """A backend on the CPU under the interpreter, with few enough processors that long contexts are split."""
    return TritonBackend(torch.device("cpu"), capability=(8, 0), processors=4, cost=ALWAYS)
