"""The small-M GEMM on a device, every shipped shape and the defaults: accuracy against float64 beside cuBLAS's,
determinism, and what must not matter."""

import pathlib
import sys

import pytest
import torch
from support.gemm_operands import KINDS, bits, errors, operands, same

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import cases

from muse_jit.ops.device import service_for

pytestmark = pytest.mark.gpu

EVERY = pytest.mark.parametrize("c", cases.gemm_sets(), ids=str)
SHIPPED = pytest.mark.parametrize("c", list(dict.fromkeys(cases.shipped_gemms())), ids=str)
POISON = 0x7FA5
"""Bits of a NaN that no kernel writes."""
GUARD = 64
"""Rows before and after an operand: as many as a kernel's largest bucket."""

SUMMATION_LIMITS = {"distant": (1.1, 1.5)}
ROUNDING_LIMITS = (1.01, 1.05)
"""How much larger than cuBLAS's mean and largest error ours may be. Where the final rounding to BF16 is nearly all of
it, it is the same rounding; where the error is that of the sums, it is one sample beside another."""


def _some_rows(c):
    """One, odd ones, full."""
    return sorted({1, 2, 3, c.rows // 2 + 1, c.rows - 1, c.rows})


def _poisoned(rows, n):
    return torch.full((rows, n), POISON, dtype=torch.int16, device="cuda").view(torch.bfloat16)


def _run(c, x, weight, out=None):
    out = _poisoned(x.shape[0], c.n) if out is None else out
    service_for(out.device).get(c)(x, weight, out)
    torch.cuda.synchronize()
    return out


@EVERY
@pytest.mark.parametrize("kind", KINDS)
def test_no_less_accurate_than_cublas(c, kind):
    mean_limit, largest_limit = SUMMATION_LIMITS.get(kind, ROUNDING_LIMITS)
    for rows in _some_rows(c):
        x, weight = operands(c.n, c.k, rows, kind, seed=rows)
        ours, stock = _run(c, x, weight), torch.mm(x, weight.t())
        assert ours.isfinite().all()
        mine, theirs = errors(ours, x, weight), errors(stock, x, weight)
        # Few results are a small sample; where theirs happen to be exact ours may be off by a bit of a subnormal.
        spread = 1.0 + 4.0 * mine.numel() ** -0.5
        assert mine.mean() <= theirs.mean() * mean_limit * spread + 2.0**-140, (rows, mine.mean() / theirs.mean())
        assert mine.max() <= theirs.max() * largest_limit * spread + 2.0**-134, (rows, mine.max() / theirs.max())


@EVERY
def test_the_output_is_overwritten_completely_and_nothing_beside_it(c):
    for rows in _some_rows(c):
        x, weight = operands(c.n, c.k, rows, seed=rows)
        memory = _poisoned(GUARD + rows + GUARD, c.n)
        out = memory[GUARD : GUARD + rows]
        _run(c, x, weight, out)
        assert not (bits(out) == POISON).any()
        assert bool((bits(memory[:GUARD]) == POISON).all())
        assert bool((bits(memory[GUARD + rows :]) == POISON).all())
        assert same(out, _run(c, x, weight))


@EVERY
def test_what_lies_around_the_operands_does_not_matter(c):
    rows = c.rows - 3
    x, weight = operands(c.n, c.k, rows)
    expected = _run(c, x, weight)
    around_x, around_weight = _poisoned(GUARD + rows + GUARD, c.k), _poisoned(GUARD + c.n + GUARD, c.k)
    around_x[GUARD : GUARD + rows], around_weight[GUARD : GUARD + c.n] = x, weight
    kept = around_x.clone()
    assert same(_run(c, around_x[GUARD : GUARD + rows], around_weight[GUARD : GUARD + c.n]), expected)
    assert same(around_x, kept)
    assert same(around_weight[GUARD : GUARD + c.n], weight)


@EVERY
def test_a_rows_bits_depend_on_nothing_but_that_row(c):
    x, weight = operands(c.n, c.k, c.rows)
    first = _run(c, x, weight)
    for _ in range(20):
        assert same(_run(c, x, weight), first)
    for row in (0, c.rows // 2, c.rows - 1):
        assert same(_run(c, x[row : row + 1].contiguous(), weight)[0], first[row])
    order = torch.randperm(c.rows, generator=torch.Generator().manual_seed(1)).cuda()
    assert same(_run(c, x[order].contiguous(), weight), first[order])
    for other in (float("nan"), float("inf"), 0.0, 1e30):
        changed = x.clone()
        changed[1::2] = other
        assert same(_run(c, changed, weight)[::2], first[::2])


@EVERY
def test_many_launches_at_once_give_the_same_bits(c):
    """Back to back in a graph, each started before the one before it has ended, and beside copies on another stream."""
    weights = [operands(c.n, c.k, 1, seed=seed)[1] for seed in range(3)]
    x, _ = operands(c.n, c.k, c.rows)
    expected = [_run(c, x, weight) for weight in weights]
    outs = [_poisoned(c.rows, c.n) for _ in range(24)]
    kernel = service_for(x.device).get(c)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number, out in enumerate(outs):
            kernel(x, weights[number % 3], out)
    noise, side = torch.empty(1 << 24, device="cuda"), torch.cuda.Stream()
    for _ in range(10):
        for out in outs:
            bits(out).fill_(POISON)
        torch.cuda.synchronize()
        graph.replay()
        with torch.cuda.stream(side):
            noise.normal_()
        torch.cuda.synchronize()
        assert all(same(out, expected[number % 3]) for number, out in enumerate(outs))


@SHIPPED
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_in_x_propagates_in_its_row_only(c, value):
    rows = min(c.rows, 5)
    x, weight = operands(c.n, c.k, rows)
    clean = _run(c, x, weight)
    for column in (0, 5, c.k // 2, c.k - 1):
        changed = x.clone()
        changed[2, column] = value
        ours, stock = _run(c, changed, weight), torch.mm(changed, weight.t())
        assert torch.equal(ours.isnan(), stock.isnan())
        assert torch.equal(ours == float("inf"), stock == float("inf"))
        assert torch.equal(ours == float("-inf"), stock == float("-inf"))
        assert not ours[2].isfinite().any()
        others = [row for row in range(rows) if row != 2]
        assert same(ours[others], clean[others])


@SHIPPED
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_in_the_weight_propagates_in_its_column_only(c, value):
    x, weight = operands(c.n, c.k, min(c.rows, 5))
    x[1, 3] = 0.0
    clean = _run(c, x, weight)
    output = c.n // 2 + 7
    changed = weight.clone()
    changed[output, 3] = value
    ours, stock = _run(c, x, changed), torch.mm(x, changed.t())
    assert torch.equal(ours.isnan(), stock.isnan())
    assert torch.equal(ours.isinf(), stock.isinf())
    assert not ours[:, output].isfinite().any()
    assert bool(ours[1, output].isnan())  # zero times infinity, too
    others = torch.arange(c.n, device="cuda") != output
    assert same(ours[:, others].contiguous(), clean[:, others].contiguous())


@SHIPPED
def test_sums_beyond_the_largest_number_are_infinite_and_zeros_are_zero(c):
    x, weight = operands(c.n, c.k, c.rows)
    huge_x, huge_weight = x.abs() * 2.0**70 + 2.0**70, weight.abs() * 2.0**70 + 2.0**70
    assert bool((_run(c, huge_x, huge_weight) == float("inf")).all())
    assert bool((_run(c, huge_x, -huge_weight) == float("-inf")).all())
    assert bool((_run(c, torch.zeros_like(x), weight) == 0).all())
    assert bool((_run(c, x, torch.zeros_like(weight)) == 0).all())
