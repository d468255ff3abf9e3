"""The small-M GEMM on a device: accuracy against float64 beside cuBLAS's, determinism, and what must not matter."""

import pytest
import torch

from muse_jit.constants.small_m_gemm import SmallMGemmConstants
from muse_jit.ops.device import service_for

pytestmark = pytest.mark.gpu

SHAPES = [
    SmallMGemmConstants(8192, 1024, 8, 64, 16, 1, 8, release_early=True),
    SmallMGemmConstants(8192, 2048, 16, 64, 8, 2, 8),
    SmallMGemmConstants(8192, 512, 64, 32, 4, 2, 4),
    SmallMGemmConstants(8192, 1024, 32, 16, 2, 1, 4, enable_pdl=False),
]
KINDS = ("normal", "cancelling", "large", "tiny")


def _operands(c, rows, kind, seed=0):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    x = torch.randn(rows, c.k, generator=generator, device="cuda")
    weight = torch.randn(c.n, c.k, generator=generator, device="cuda") * c.k**-0.5
    if kind == "cancelling":  # each product is there once more with the other sign, but for a little
        x[:, 1::2] = x[:, ::2]
        weight[:, 1::2] = -weight[:, ::2] * (1 + 2**-7)
    scale = {"large": 1e18, "tiny": 1e-18}.get(kind, 1.0)
    return (x * scale).bfloat16(), (weight * scale).bfloat16()


def _run(c, x, weight):
    out = torch.full((x.shape[0], c.n), float("nan"), dtype=torch.bfloat16, device="cuda")
    service_for(out.device).get(c)(x, weight, out)
    torch.cuda.synchronize()
    return out


def _errors(out, x, weight):
    exact = x.double() @ weight.double().t()
    return (out.double() - exact).abs()


@pytest.mark.parametrize("c", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_no_less_accurate_than_cublas(c, kind):
    for rows in sorted({1, 3, c.rows - 1, c.rows}):
        x, weight = _operands(c, rows, kind, seed=rows)
        ours, stock = _run(c, x, weight), torch.mm(x, weight.t())
        assert not ours.isnan().any()
        mine, theirs = _errors(ours, x, weight), _errors(stock, x, weight)
        assert mine.mean() <= theirs.mean() * 1.001
        assert mine.max() <= theirs.max() * 1.05 + 1e-30


@pytest.mark.parametrize("c", SHAPES, ids=str)
def test_the_same_input_gives_the_same_bits_whatever_the_other_rows_hold(c):
    x, weight = _operands(c, c.rows, "normal")
    first = _run(c, x, weight)
    for _ in range(20):
        assert torch.equal(_run(c, x, weight).view(torch.int16), first.view(torch.int16))
    for row in (0, c.rows // 2, c.rows - 1):
        alone = _run(c, x[row : row + 1].contiguous(), weight)
        assert torch.equal(alone[0].view(torch.int16), first[row].view(torch.int16))
    poisoned = x.clone()
    poisoned[1:] = float("nan")
    assert torch.equal(_run(c, poisoned, weight)[0].view(torch.int16), first[0].view(torch.int16))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_propagates(value):
    c = SHAPES[0]
    x, weight = _operands(c, 4, "normal")
    x[2, 5] = value
    ours, stock = _run(c, x, weight), torch.mm(x, weight.t())
    assert torch.equal(ours.isnan(), stock.isnan())
    assert torch.equal(ours.isinf(), stock.isinf())
    assert ours[[0, 1, 3]].isfinite().all()
