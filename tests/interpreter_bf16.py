"""Test-time repair of Triton 3.9.0's interpreter for bf16.

The interpreter keeps bf16 as uint16 bit patterns and then calculates with the patterns: dots multiply them, casts cut
digits off. Here every operation that meets a bf16 operand widens it to fp32, calculates there and rounds the result to
nearest even, which is what a GPU does. Importing this module, after TRITON_INTERPRET=1 is
set and before a kernel runs, makes the repair.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, ReduceOps, TensorHandle


def widen(bits: np.ndarray) -> np.ndarray:
    """bf16 bit patterns to fp32."""
    return (np.ascontiguousarray(bits).astype(np.uint32) << 16).view(np.float32)


def narrow(values: np.ndarray) -> np.ndarray:
    """fp32 to bf16 bit patterns, to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), ((bits >> 16) | 0x40).astype(np.uint16), rounded)


def _is_bf16(dtype: tl.dtype) -> bool:
    return bool(dtype.scalar == tl.bfloat16)


def _widened(handle: TensorHandle) -> TensorHandle:
    return TensorHandle(widen(handle.data), tl.float32) if _is_bf16(handle.dtype) else handle


def _narrowed(values: np.ndarray) -> TensorHandle:
    return TensorHandle(narrow(values), tl.bfloat16)


def _repair_casts() -> None:
    plain_cast, plain_fp_to_fp = InterpreterBuilder.cast_impl, InterpreterBuilder.create_fp_to_fp

    def cast_impl(self: InterpreterBuilder, source: TensorHandle, to: tl.dtype) -> TensorHandle:
        if _is_bf16(source.dtype) and not _is_bf16(to):
            wide = _widened(source)
            return wide if to.scalar == tl.float32 else plain_cast(self, wide, to)
        if _is_bf16(to) and not _is_bf16(source.dtype):
            return _narrowed(source.data.astype(np.float32))
        return plain_cast(self, source, to)

    def create_fp_to_fp(self: InterpreterBuilder, source: TensorHandle, to: tl.dtype, rounding: Any) -> TensorHandle:
        bf16_and_no_fp8 = (_is_bf16(source.dtype) or _is_bf16(to)) and (
            min(source.dtype.scalar.primitive_bitwidth, to.scalar.primitive_bitwidth) > 8
        )
        return cast_impl(self, source, to) if bf16_and_no_fp8 else plain_fp_to_fp(self, source, to, rounding)

    InterpreterBuilder.cast_impl = cast_impl
    InterpreterBuilder.create_fp_to_fp = create_fp_to_fp


def _repair_arithmetic() -> None:
    plain_unary, plain_binary = InterpreterBuilder.unary_op, InterpreterBuilder.binary_op
    plain_dot = InterpreterBuilder.create_dot

    def unary_op(self: InterpreterBuilder, x: TensorHandle, op: Callable[..., np.ndarray]) -> TensorHandle:
        return _narrowed(op(widen(x.data))) if _is_bf16(x.dtype) else plain_unary(self, x, op)

    def binary_op(
        self: InterpreterBuilder, x: TensorHandle, y: TensorHandle, op: Callable[..., np.ndarray]
    ) -> TensorHandle:
        if not _is_bf16(x.dtype):
            return plain_binary(self, x, y, op)
        result = op(widen(x.data), widen(y.data))
        return TensorHandle(result, tl.int1) if result.dtype == np.bool_ else _narrowed(result)

    def create_dot(self: InterpreterBuilder, x: TensorHandle, y: TensorHandle, *rest: Any) -> TensorHandle:
        return plain_dot(self, _widened(x), _widened(y), *rest)

    InterpreterBuilder.unary_op = unary_op
    InterpreterBuilder.binary_op = binary_op
    InterpreterBuilder.create_dot = create_dot


def _repair_reductions() -> None:
    plain_apply = ReduceOps.apply

    def apply(self: ReduceOps, x: Any) -> Any:
        if isinstance(x, tuple) or x.dtype != tl.bfloat16:
            return plain_apply(self, x)
        wide = tl.core.tensor(_widened(x.handle), tl.block_type(tl.float32, list(x.shape)))
        result = plain_apply(self, wide)
        kind = tl.block_type(tl.bfloat16, list(result.shape)) if result.type.is_block() else tl.bfloat16
        return tl.core.tensor(_narrowed(result.handle.data), kind)

    ReduceOps.apply = apply


_repair_casts()
_repair_arithmetic()
_repair_reductions()
