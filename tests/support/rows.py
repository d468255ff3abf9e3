"""Rows for bit tests: random ones of every magnitude, and the values that break careless arithmetic."""

import torch

KINDS = ("normal", "magnitudes", "wide", "zeros", "negative_zeros", "infinities", "nans", "denormals", "one_hot")


def rows_of(kind, rows, width, dtype, seed, device="cuda"):
    """[rows, width] of one kind, reproducible by seed."""
    generator = torch.Generator(device=device).manual_seed(seed)
    x = torch.randn(rows, width, generator=generator, device=device, dtype=torch.float32)
    if kind == "magnitudes":  # each row at its own magnitude, 1e-30 to 1e30
        exponents = torch.rand(rows, 1, generator=generator, device=device) * 60 - 30
        x = x * torch.pow(10.0, exponents.double()).float()
    elif kind == "wide":  # all magnitudes inside one row
        x = x * torch.pow(10.0, torch.rand(rows, width, generator=generator, device=device) * 12 - 6)
    elif kind == "zeros":
        x = torch.zeros_like(x)
    elif kind == "negative_zeros":
        x = torch.where(torch.rand(rows, width, generator=generator, device=device) < 0.5, -torch.zeros_like(x), x)
        x[0] = -0.0
    elif kind == "infinities":
        x[torch.rand(rows, width, generator=generator, device=device) < 1e-3] = float("inf")
        x[0, width // 3] = float("-inf")
    elif kind == "nans":
        x[torch.rand(rows, width, generator=generator, device=device) < 1e-3] = float("nan")
        x[0, width // 2] = float("nan")
    elif kind == "denormals":
        x = x * 1e-40
        x[:, ::7] = 1e-38
    elif kind == "one_hot":
        x = torch.zeros_like(x)
        x[:, 5] = 3.0
    return x.to(dtype)


def same_bits(a, b):
    """Number of elements whose bits differ; a NaN equals a NaN of any payload."""
    integers = {2: torch.int16, 4: torch.int32}[a.element_size()]
    differ = a.view(integers) != b.view(integers)
    return int((differ & ~(a.isnan() & b.isnan())).sum())
