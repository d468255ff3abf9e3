"""The norms' order of operations, written from what stock's PTX and SASS do and not from the kernels here."""

from collections.abc import Callable

import numpy as np

from muse_jit.constants.row_norm import RowNormConstants
from oracle import fp32
from oracle.fp32 import F32

Rsqrt = Callable[[F32], F32]


def constant(value: float) -> F32:
    return np.array([value], np.float32)


def adjacent_tree(terms: F32) -> F32:
    """Balanced tree over neighbours along the last axis."""
    while terms.shape[-1] > 1:
        terms = fp32.add(terms[..., 0::2], terms[..., 1::2])
    return terms[..., 0]


def squares_pairwise(x: F32) -> F32:
    """Triton 3.8.0, sm_90: fma(even, even, rn(odd^2)), adjacent tree."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return adjacent_tree(fp32.fma(even, even, fp32.mul(odd, odd)))


def squares_two_lanes(x: F32) -> F32:
    """Triton 3.8.0, sm_100 and sm_103: rounded squares, evens and odds apart, even + odd last."""
    squares = fp32.mul(x, x)
    return fp32.add(adjacent_tree(squares[..., 0::2]), adjacent_tree(squares[..., 1::2]))


def squares_two_lanes_fused(x: F32) -> F32:
    """Triton 3.8.0, sm_100 and sm_103 with the weight before the norm, and sm_120: first level fused."""
    lanes = []
    for lane in (0, 1):
        mine = x[..., lane::2]
        first, second = mine[..., 0::2], mine[..., 1::2]
        lanes.append(adjacent_tree(fp32.fma(first, first, fp32.mul(second, second))))
    return fp32.add(lanes[0], lanes[1])


def squares_chain(x: F32) -> F32:
    """Triton 3.6.0: rn(x1^2), then FMAs over x0, x2, x3, ..."""
    total = fp32.fma(x[..., 0], x[..., 0], fp32.mul(x[..., 1], x[..., 1]))
    for k in range(2, x.shape[-1]):
        total = fp32.fma(x[..., k], x[..., k], total)
    return total


def thread_order(constants: RowNormConstants, arch: str) -> Callable[[F32], F32]:
    if constants.order == "triton-3.6":
        return squares_chain
    if arch == "sm_90a":
        return squares_pairwise
    fused = arch == "sm_120a" or constants.weight_before_norm
    return squares_two_lanes_fused if fused else squares_two_lanes


def butterfly(values: F32, lanes: int) -> F32:
    """Every lane's result of xor lanes/2, ..., 1 along the last axis, in groups of `lanes`."""
    index = np.arange(values.shape[-1])
    offset = lanes // 2
    while offset:
        values = fp32.add(values, values[..., index ^ offset])
        offset //= 2
    return values


def row_sum(x: F32, width: int, order: Callable[[F32], F32]) -> F32:
    """Sum of squares of each padded row as 256 threads (fewer for narrow rows) of `width` columns make it."""
    rows, tile = x.shape
    threads = min(256, tile // width)
    # [row, repeat, thread, column] -> [row, thread, repeat * column]: repeats are the slower index in a thread.
    mine = x.reshape(rows, -1, threads, width).transpose(0, 2, 1, 3).reshape(rows, threads, -1)
    warps = threads // 32
    per_warp = butterfly(order(mine), 32)[:, ::32]
    return butterfly(per_warp, warps)[:, 0]


def row_norm(
    x: F32, weight: F32 | None, constants: RowNormConstants, arch: str, rsqrt: Rsqrt = fp32.rsqrt
) -> tuple[F32, F32 | None, F32 | None]:
    """(out, stream, aux) for x [rows, hidden]; all as FP32 values, a BF16 output already rounded."""
    c = constants
    width = 4 if c.x_fp32 and c.out_dtype == "fp32" else 8
    tile = max(1 << (c.hidden - 1).bit_length(), 32 * width)
    gain = None if weight is None else fp32.add(weight, constant(c.gain_center))[None, :]
    scaled = fp32.mul(x, gain) if c.weight_before_norm and gain is not None else x
    padded = np.zeros((x.shape[0], tile), np.float32)
    padded[:, : c.hidden] = scaled
    total = row_sum(padded, width, thread_order(c, arch))
    scale = rsqrt(fp32.fma(total, constant(1.0 / c.hidden), constant(c.eps)))
    out = fp32.mul(scaled, scale[:, None])
    if gain is not None and not c.weight_before_norm:
        out = fp32.mul(out, gain)
    if c.out_dtype == "bf16":
        out = fp32.round_bf16(out)
    return out, (x.copy() if c.stream else None), (x.copy() if c.aux else None)
