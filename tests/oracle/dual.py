"""The dual norm's order of operations, written from what stock's PTX and SASS do and not from the kernel here."""

import numpy as np

from muse_jit.constants.dual_norm import DualNormConstants
from oracle import fp32, norms
from oracle.fp32 import F32
from oracle.norms import Rsqrt, constant

BLACKWELL = """
triton-3.8 bf16 channel tensor  FR FF FR  FR FF FR  FR FF FR
triton-3.8 bf16 channel number  RR RR RR  FF FR FR  FF RR FR
triton-3.8 bf16 scalar  tensor  RR RR RR  FR FR FR  RR RR RR
triton-3.8 bf16 scalar  number  RR RR RR  FR FR FR  RR RR RR
triton-3.8 fp32 channel tensor  RF FF RF  FF FF FF  RF FF RF
triton-3.8 fp32 channel number  RF RR RF  FF FR FF  RF RR RF
triton-3.8 fp32 scalar  tensor  RF RR RF  FF FR FF  RF RR RF
triton-3.8 fp32 scalar  number  RF RR RF  FF FR FF  RF RR RF
triton-3.6 bf16 channel tensor  OO OO OO  OO OO OO  OO OO OO
triton-3.6 bf16 channel number  OC OC OC  OC MM MM  OC MM MM
triton-3.6 bf16 scalar  tensor  OC OC OC  OC OC OC  OC OC OC
triton-3.6 bf16 scalar  number  OC OC OC  OC OC OC  OC OC OC
triton-3.6 fp32 channel tensor  OC OO OC  OC OO OC  OC OO OC
triton-3.6 fp32 channel number  OC OO OC  OC OO OC  OC OO OC
triton-3.6 fp32 scalar  tensor  OC OO OC  OC OO OC  OC OO OC
triton-3.6 fp32 scalar  number  OC OO OC  OC OO OC  OC OO OC
"""
"""What the assembled stock kernels do on sm_100 (3.8.0: and sm_103, the same) at hidden 8192: the two sums' orders, as
letters of `ORDERS`. Three groups of columns: no post weight, before, after; in each: no next weight, before, after."""


def chain_rounding(x: F32, rounded: tuple[int, ...]) -> F32:
    """Triton 3.6.0: rn(x1^2), then FMAs over x0, x2, ..., but some squares are rounded and added."""
    total = fp32.fma(x[..., 0], x[..., 0], fp32.mul(x[..., 1], x[..., 1]))
    for k in range(2, x.shape[-1]):
        xk = x[..., k]
        total = fp32.add(fp32.mul(xk, xk), total) if k in rounded else fp32.fma(xk, xk, total)
    return total


def chain_in_order(x: F32) -> F32:
    """FlashInfer: FMAs over x0, x1, ..., from zero."""
    total = np.zeros(x.shape[:-1], np.float32)
    for k in range(x.shape[-1]):
        total = fp32.fma(x[..., k], x[..., k], total)
    return total


ORDERS = {
    "P": norms.squares_pairwise,
    "R": norms.squares_two_lanes,
    "F": norms.squares_two_lanes_fused,
    "C": lambda x: chain_rounding(x, ()),
    "O": lambda x: chain_rounding(x, (3, 5, 7)),
    "M": lambda x: chain_rounding(x, (4, 5)),
    "I": chain_in_order,
}


def letters(c: DualNormConstants, arch: str) -> str:
    """The orders of the two sums."""
    if c.order == "flashinfer-0.7":
        return "II"
    if arch == "sm_90a":
        return "PP" if c.order == "triton-3.8" else "CC"
    if arch == "sm_120a":
        return "FF" if c.order == "triton-3.8" else "CC"
    wanted = [c.order, c.out_dtype, c.gate, "tensor" if c.alpha_tensor else "number"]
    (row,) = [line.split()[4:] for line in BLACKWELL.strip().splitlines() if line.split()[:4] == wanted]
    following = "after" if c.next_has_weight else "none"
    following = "before" if c.next_weight_before else following
    places = ("none", "before", "after")
    return row[3 * places.index(c.post_weight) + places.index(following)]


def row_sum(x: F32, letter: str, *, halves: bool = False) -> F32:
    """Sum of squares of each padded row: 8 columns a thread, warps, then the warps' sums.

    A thread's columns are neighbours, or (`halves`) four of each half of the row.
    """
    threads = x.reshape(x.shape[0], 2, -1, 4).transpose(0, 2, 1, 3) if halves else x
    mine = ORDERS[letter](threads.reshape(x.shape[0], -1, 8))
    per_warp = norms.butterfly(mine, 32)[:, ::32]
    return norms.butterfly(per_warp, per_warp.shape[-1])[:, 0]


def dual_norm(
    partial: F32,
    stream: F32,
    post_weight: F32 | None,
    alpha: F32 | None,
    beta: F32,
    next_weight: F32 | None,
    constants: DualNormConstants,
    arch: str,
    rsqrt: Rsqrt = fp32.rsqrt,
) -> tuple[F32, F32]:
    """(new stream, out) for partial and stream [rows, hidden]; FP32 values, a BF16 output already rounded."""
    c = constants
    first, second = letters(c, arch)
    tile = max(1 << (c.hidden - 1).bit_length(), 256)

    def pad(a: F32 | None) -> F32 | None:
        if a is None or a.shape[-1] != c.hidden:
            return a
        return np.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, tile - c.hidden)])

    def scale(values: F32, letter: str, eps: float, *, halves: bool = False) -> F32:
        total = row_sum(values, letter, halves=halves)
        return rsqrt(fp32.fma(total, constant(1.0 / c.hidden), constant(eps)))[:, None]

    post_gain = None if post_weight is None else fp32.add(pad(post_weight), constant(c.post_gain_center))
    next_gain = None if next_weight is None else fp32.add(pad(next_weight), constant(c.next_gain_center))
    x, s, beta = pad(partial), pad(stream), pad(beta)
    alpha = constant(c.alpha) if alpha is None else pad(alpha)
    if c.post_weight == "before":
        x = fp32.mul(x, post_gain)
    r = scale(x, first, c.post_eps)
    if c.order == "flashinfer-0.7" and (c.alpha_tensor or c.alpha == 1.0):
        new = fp32.fma(fp32.mul(beta, x), r, fp32.mul(alpha, s))
    elif c.order == "flashinfer-0.7":
        new = fp32.fma(s, alpha, fp32.mul(fp32.mul(beta, x), r))
    else:
        y = fp32.mul(x, r)
        y = fp32.mul(y, post_gain) if c.post_weight == "after" else y
        new = fp32.fma(s, alpha, fp32.mul(y, beta))
    z = fp32.mul(new, next_gain) if c.next_weight_before else new
    # Triton turns the stream, to store 4 FP32 columns a thread, before the sum if the output is stored like that too.
    halves = c.order.startswith("triton") and c.out_dtype == "fp32" and not c.next_weight_before
    out = fp32.mul(z, scale(z, second, c.next_eps, halves=halves))
    if next_gain is not None and not c.next_weight_before:
        out = fp32.mul(out, next_gain)
    new, out = new[:, : c.hidden], out[:, : c.hidden]
    return new, (fp32.round_bf16(out) if c.out_dtype == "bf16" else out)
