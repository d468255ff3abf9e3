"""Operands for tests of a GEMM, random ones and those on which careless sums go wrong, and errors against float64."""

import torch

KINDS = ("normal", "adjacent", "distant", "large", "tiny", "extremes", "subnormal_weight", "subnormal_result")
"""What `operands` can make:

normal            random, results about 1
adjacent          each product is there once more with the other sign beside it, but for 2**-7 of it
distant           each product is there once more with the other sign, half of K away; what is left is 2**-18 of the
                  sums on the way, so that the error is that of the summation
large, tiny       random, results about 1e36 and 1e-36
extremes          x of the largest finite magnitude, the weight of the smallest normal one
subnormal_weight  every element of the weight subnormal
subnormal_result  results about the smallest subnormal
"""


def operands(n, k, rows, kind="normal", seed=0):
    """x [rows, k] and weight [n, k], BF16, reproducible by seed."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    x = torch.randn(rows, k, generator=generator, device="cuda")
    weight = torch.randn(n, k, generator=generator, device="cuda") * k**-0.5
    half = k // 2
    if kind == "adjacent":
        x[:, 1::2] = x[:, ::2]
        weight[:, 1::2] = -weight[:, ::2] * (1 + 2**-7)
    elif kind == "distant":
        x[:, half : 2 * half] = x[:, :half]
        weight[:, half : 2 * half] = -weight[:, :half]
        x[:, :half:8] *= 2.0**-18
        weight[:, half : 2 * half : 8] = 0.0
    elif kind in ("large", "tiny", "subnormal_result"):
        scale = {"large": 1e18, "tiny": 1e-18, "subnormal_result": 2.0**-66}[kind]
        x, weight = x * scale, weight * scale
    elif kind == "extremes":
        x, weight = _at(x, generator, 127), _at(weight, generator, -126)
    elif kind == "subnormal_weight":
        bits = torch.randint(1, 128, (n, k), generator=generator, device="cuda", dtype=torch.int16)
        signs = torch.where(weight < 0, -(2**15), 0).to(torch.int16)
        return (x * 2.0**120).bfloat16(), (bits | signs).view(torch.bfloat16)
    return x.bfloat16(), weight.bfloat16()


def _at(values, generator, exponent):
    """Random magnitudes from 2**exponent to 1.98 times that, with the signs of `values`."""
    mantissas = 1.0 + 0.98 * torch.rand(values.shape, generator=generator, device="cuda")
    return torch.copysign(mantissas * 2.0**exponent, values)


def errors(out, x, weight):
    """|out - x weight^T|, the latter in float64."""
    return (out.double() - x.double() @ weight.double().t()).abs()


def bits(tensor):
    """BF16 as integers, for exact comparisons."""
    return tensor.view(torch.int16)


def same(a, b):
    """Whether all bits are equal."""
    return torch.equal(bits(a), bits(b))
