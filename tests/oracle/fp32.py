"""FP32 arithmetic on numpy arrays, one rounding to nearest even an operation, subnormals kept, and BF16 rounding.

numpy's float32 `*` and `+` already are that. FMA is not in numpy: the product of two float32 is exact in float64, but
adding a third number rounds once in float64 and once more to float32, which can differ from a single rounding. So the
float64 sum is made odd where it was inexact (its last bit then stands for everything below it), after which the second
rounding is the only one: 53 bits are more than the 24 + 2 that this needs.
"""

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]


def mul(a: F32, b: F32) -> F32:
    with np.errstate(all="ignore"):
        return np.multiply(a, b, dtype=np.float32)


def add(a: F32, b: F32) -> F32:
    with np.errstate(all="ignore"):
        return np.add(a, b, dtype=np.float32)


def fma(a: F32, b: F32, c: F32) -> F32:
    """rn(a * b + c)."""
    with np.errstate(all="ignore"):
        product = np.multiply(a, b, dtype=np.float64)
        addend = np.asarray(c, dtype=np.float64)
        total = np.atleast_1d(product + addend)
        # Knuth's two-sum: product + addend == total + error, exactly.
        part = total - product
        error = (product - (total - part)) + (addend - part)
        bits = total.view(np.int64)
        inexact = np.isfinite(total) & (error != 0) & (bits & 1 == 0)
        away = (error > 0) == (total > 0)
        bits = np.where(inexact, np.where(away, bits + 1, bits - 1), bits)
        return bits.view(np.float64).astype(np.float32).reshape(np.broadcast_shapes(product.shape, addend.shape))


def rsqrt(a: F32) -> F32:
    """Stands in for `rsqrt.approx.ftz.f32`, whose table is the hardware's own business.

    Correctly rounded 1 / sqrt(a) (through extended precision; no float32 comes near enough to a tie to be misrounded);
    subnormal operands count as zero, as `.ftz` says. Where a test needs the machine's bits it passes its own function.
    """
    with np.errstate(all="ignore"):
        flushed = np.where(np.abs(a) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), a), a)
        root = 1 / np.sqrt(flushed.astype(np.longdouble))
        return np.where(flushed == 0, np.copysign(np.float32(np.inf), flushed), root.astype(np.float32))


def to_bf16(a: F32) -> NDArray[np.uint16]:
    """The bits of a rounded to nearest even BF16; every NaN becomes 0x7fff, as the hardware does."""
    bits = np.ascontiguousarray(a, dtype=np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(a), 0x7FFF, rounded).astype(np.uint16)


def from_bf16(bits: NDArray[np.uint16]) -> F32:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def round_bf16(a: F32) -> F32:
    return from_bf16(to_bf16(a))


def differing(a: F32, b: F32) -> int:
    """How many elements differ in their bits; NaNs are equal whatever their payload."""
    assert a.shape == b.shape
    assert a.dtype == b.dtype == np.float32
    bits = np.ascontiguousarray(a).view(np.uint32) != np.ascontiguousarray(b).view(np.uint32)
    return int(np.count_nonzero(bits & ~(np.isnan(a) & np.isnan(b))))
