"""Stock's all-reduces in their order of operations, for any number of ranks; written from what stock does."""

import numpy as np

from oracle import fp32
from oracle.fp32 import F32


def flushed(a: F32) -> F32:
    """Subnormals as zeros of their sign."""
    return np.where(np.abs(a) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), a), a).astype(np.float32)


def add_flushed(a: F32, b: F32) -> F32:
    return flushed(fp32.add(flushed(a), flushed(b)))


def canonical(bits: np.ndarray) -> np.ndarray:
    """BF16 bits as they are published: -0 is +0."""
    return np.where(bits == 0x8000, 0, bits).astype(np.uint16)


def all_reduce(partials: list[F32], order: str) -> F32:
    """The sum of BF16 values over the ranks, in BF16.

    "mnnvl": from +0 in rank order in FP32, at 16 ranks two such sums of 8, rounded once. "node-local": in rank order,
    rounded after every addition. Both are compiled with -use_fast_math, so additions flush; all payloads have +0 for
    -0.
    """
    values = [fp32.from_bf16(canonical(fp32.to_bf16(p))) for p in partials]
    if order == "node-local":
        total = values[0]
        for value in values[1:]:
            total = fp32.round_bf16(add_flushed(total, value))
        return total
    sums = []
    for first in range(0, len(values), 8):
        total = np.zeros_like(values[0])
        for value in values[first : first + 8]:
            total = add_flushed(total, value)
        sums.append(total)
    return fp32.round_bf16(sums[0] if len(sums) == 1 else add_flushed(*sums))
