"""The oracle's own arithmetic, against exact fractions."""

import math
from fractions import Fraction

import numpy as np

from oracle import fp32


def rounded(value: Fraction) -> np.float32:
    """The float32 nearest to a fraction, ties to even, found among neighbours by exact comparison."""
    if value == 0:
        return np.float32(0)
    exponent = max(math.frexp(float(value))[1], -125)
    unit = Fraction(2) ** (exponent - 24)
    return np.float32(float(round(value / unit) * unit))


def test_fma_rounds_once() -> None:
    random = np.random.default_rng(3)
    a, b = (random.standard_normal(3000).astype(np.float32) for _ in range(2))
    exponents = random.integers(-60, 10, 3000)
    c = (random.standard_normal(3000) * 2.0**exponents).astype(np.float32)
    # Products next to a tie, with an addend far below: float64 alone rounds these twice.
    a[:1000] = np.float32(1) + random.integers(1, 4096, 1000).astype(np.float32) * np.float32(2.0**-12)
    b[:1000] = np.float32(1) + np.float32(2.0**-12)
    c[:1000] *= np.float32(2.0**-30)
    a[1000:1200] *= np.float32(2.0**-75)
    b[1000:1200] *= np.float32(2.0**-75)
    c[1000:1200] = np.float32(1e-42)
    exact = [[Fraction(float(value)) for value in values] for values in (a, b, c)]
    expected = [rounded(x * y + z) for x, y, z in zip(*exact, strict=True)]
    assert fp32.differing(fp32.fma(a, b, c), np.array(expected, np.float32)) == 0
    twice = (a.astype(np.float64) * b + c).astype(np.float32)
    assert fp32.differing(fp32.fma(a, b, c), twice) > 0


def test_special_values_of_fma() -> None:
    inf, nan = np.float32(np.inf), np.float32(np.nan)
    a = np.array([inf, 0.0, inf, -0.0, 3e38, 1.0, nan], np.float32)
    b = np.array([0.0, inf, 1.0, 1.0, 3e38, 1.0, 1.0], np.float32)
    c = np.array([1.0, 1.0, -inf, -0.0, -inf, -1.0, 1.0], np.float32)
    expected = np.array([nan, nan, nan, -0.0, -inf, 0.0, nan], np.float32)
    assert fp32.differing(fp32.fma(a, b, c), expected) == 0


def test_bf16_rounds_to_even() -> None:
    cases = {0x3F808000: 0x3F80, 0x3F818000: 0x3F82, 0x3F808001: 0x3F81, 0x7F7FFFFF: 0x7F80, 0x7F800001: 0x7FFF,
             0xFF800000: 0xFF80, 0x00018000: 0x0002, 0x80000000: 0x8000}  # fmt: skip
    values = np.array(list(cases), np.uint32).view(np.float32)
    assert fp32.to_bf16(values).tolist() == list(cases.values())


def test_rsqrt() -> None:
    a = np.array([4.0, 0.0, -0.0, 1e-40, np.inf, -1.0, 2.0, 2.0**-126], np.float32)
    expected = [0.5, np.inf, -np.inf, np.inf, 0.0, np.nan, 0.70710677, 2.0**63]
    assert fp32.differing(fp32.rsqrt(a), np.array(expected, np.float32)) == 0
