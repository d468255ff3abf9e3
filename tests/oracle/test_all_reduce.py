"""The emulated all-reduce on values whose sums are known."""

import numpy as np
import pytest

from oracle import all_reduce, fp32


def reduced(values, order="mnnvl"):
    """Bits of the sum of one value a rank."""
    return int(fp32.to_bf16(all_reduce.all_reduce([np.array([v], np.float32) for v in values], order))[0])


TINY = 2.0**-126  # the smallest normal number
SUBNORMAL = 2.0**-130


@pytest.mark.parametrize("order", ["mnnvl", "node-local"])
def test_special_values(order):
    assert reduced([-0.0, -0.0], order) == 0
    assert reduced([SUBNORMAL, SUBNORMAL], order) == 0  # flushed as operands
    assert reduced([1.5 * TINY, -TINY], order) == 0  # flushed as a result
    assert reduced([np.inf, -np.inf], order) == 0x7FFF
    assert reduced([np.inf, 1.0], order) == 0x7F80
    assert reduced([np.nan, 1.0], order) == 0x7FFF
    assert reduced([3e38, 3e38], order) == 0x7F80


def test_only_a_flushed_result_can_be_minus_zero():
    assert reduced([-SUBNORMAL, -SUBNORMAL]) == 0  # from +0
    assert reduced([-SUBNORMAL, -SUBNORMAL], "node-local") == 0x8000
    assert reduced([TINY, -1.5 * TINY]) == 0x8000


def test_the_orders_differ_where_they_round():
    half_ulp = 2.0**-8  # of a BF16 at 1
    values = [1.0, half_ulp, half_ulp, half_ulp]
    assert reduced(values) == fp32.to_bf16(np.array([1.0 + 3 * half_ulp], np.float32))[0]
    assert reduced(values, "node-local") == 0x3F80  # each half an ulp is rounded away, to even


def test_sixteen_ranks_are_two_sums_of_eight():
    small = 2.0**-24  # half an ulp of an FP32 at 1
    values = [1.0, small] + [0.0] * 6 + [small] * 8
    # In one chain every small one is lost; in two, the second sum is 8 small ones, which survive in FP32.
    total = np.float32(1.0) + np.float32(8 * small)
    assert total > 1
    values[1] = 2.0**-8  # at the tie of BF16: what survives decides the rounding
    assert reduced(values) == 0x3F81
    assert reduced([*values[:8]], "mnnvl") == 0x3F80


@pytest.mark.parametrize("order", ["mnnvl", "node-local"])
@pytest.mark.parametrize("tp", [2, 8, 16])
def test_the_torch_version_agrees(tp, order):
    import torch
    from support.rows import KINDS, rows_of, same_bits
    from support.stock_sum import stock_sum

    for first in range(len(KINDS)):
        kinds = [KINDS[(first + p) % len(KINDS)] for p in range(tp)]
        partials = [rows_of(kind, 3, 512, torch.bfloat16, p, device="cpu") for p, kind in enumerate(kinds)]
        got = stock_sum(partials, order)
        wanted = all_reduce.all_reduce([p.float().numpy() for p in partials], order)
        assert same_bits(got.float(), torch.from_numpy(wanted)) == 0
