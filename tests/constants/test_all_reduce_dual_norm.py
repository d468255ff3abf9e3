import dataclasses

import pytest

from muse_jit.constants.all_reduce_dual_norm import AllReduceDualNormConstants
from muse_jit.constants.dual_norm import DualNormConstants
from muse_jit.constants.mailbox import REPORTED, Missing, Shape, missing_of
from muse_jit.errors import ConstantsError

D1 = DualNormConstants(8192, 1e-8, next_eps=1e-5, next_gain_center=1.0)
FUSED = AllReduceDualNormConstants.of(D1, 4, "mnnvl", published=False)


def test_it_is_the_boundary_and_the_mailbox():
    assert FUSED.boundary == D1
    assert FUSED != D1
    assert FUSED.as_dict() == {
        **D1.as_dict(), "tp": 4, "sum_order": "mnnvl", "role": "both", "transport": "peer", "capacity": 64,
        "timeout_s": 600.0, "wait_last": False,
    }  # fmt: skip
    assert AllReduceDualNormConstants.from_dict(FUSED.as_dict()) == FUSED


def test_who_publishes_decides_the_role():
    published = AllReduceDualNormConstants.of(D1, 8, "node-local", published=True, capacity=8, wait_last=True)
    assert (published.role, published.tp, published.sum_order) == ("consume", 8, "node-local")
    assert (published.capacity, published.wait_last) == (8, True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tp": 3}, "tp is 3; allowed: 2, 4, 8, 16"),
        ({"tp": 1}, "tp is 1"),
        ({"sum_order": "ring"}, "sum_order is 'ring'; allowed: 'mnnvl', 'node-local'"),
        ({"role": "consumer"}, "role is 'consumer'; allowed: 'both', 'consume', 'publish'"),
        ({"transport": "tcp"}, "transport is 'tcp'; allowed: 'peer', 'multicast'"),
        ({"capacity": 0}, "capacity is 0; it must be from 1 to 4096"),
        ({"capacity": 4097}, "capacity is 4097"),
        ({"timeout_s": 0.0}, "timeout_s is 0.0; it must be positive and at most 3600 seconds"),
        ({"timeout_s": 3601.0}, "timeout_s is 3601.0"),
        ({"timeout_s": 30}, "timeout_s is 30; it must be of type float"),
        ({"hidden": 8184}, "hidden is 8184; with an all-reduce it must be a power of two, at least 256"),
        ({"hidden": 128, "ctas_per_row": 1}, "hidden is 128"),
        ({"out_dtype": "fp32"}, "out_dtype is 'fp32'; with an all-reduce it must be 'bf16'"),
        ({"wait_last": True}, "wait_last is True; it needs role='consume' and enable_pdl=True"),
        ({"wait_last": True, "role": "consume", "enable_pdl": False}, "wait_last is True"),
        ({"post_eps": 0.0}, "post_eps is 0.0"),
    ],
)
def test_impossible_sets_name_the_field(change, message):
    with pytest.raises(ConstantsError, match=f"AllReduceDualNormConstants.{message}"):
        dataclasses.replace(FUSED, **change)


def test_a_status_word_says_who_is_missing():
    assert missing_of(0) is None
    assert missing_of(REPORTED | 2 << 24 | 15 << 16 | 4095) == Missing(rank=15, row=4095, generation=2)


def test_slots_of_a_rank_lie_together():
    assert Shape(8, 64, 8192).rank_bytes == 64 * 8192 * 2
