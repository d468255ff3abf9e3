"""The fused all-reduce's runtime object, with kernels that only note what they were called with."""

import types

import pytest
import torch

from muse_jit.constants.dual_norm import DualNormConstants
from muse_jit.errors import CompileDuringCapture
from muse_jit.ops import all_reduce_dual_norm, dual_norm
from muse_jit.ops.all_reduce_dual_norm import AllReduceDualNorm, PartialPublisher, publisher_of
from muse_jit.ops.lamport_mailbox import LamportMailbox
from muse_jit.plan import Deployment, attention_boundary, fused_boundary

CPU = torch.device("cpu")
SMALL = DualNormConstants(256, 1e-8, next_eps=1e-5, next_gain_center=1.0, ctas_per_row=1)


@pytest.fixture
def launched(monkeypatch):
    """(constants, operands) of every launch; constants asked for come first, with None."""
    noted = []

    def get(constants):
        noted.append((constants, None))
        return types.SimpleNamespace(
            function=lambda *operands: noted.append((constants, operands)), prepare=lambda index: None
        )

    for module in (dual_norm, all_reduce_dual_norm):
        monkeypatch.setattr(module, "service_for", lambda device: types.SimpleNamespace(get=get))
    return noted


@pytest.fixture
def shared(launched):
    return AllReduceDualNorm.over(LamportMailbox.stand_in(2, CPU, width=256, capacity=4)[0], "mnnvl")


def _operands(rows):
    def aligned(shape, dtype):
        return torch.zeros(shape, dtype=dtype)

    return {
        "partial": aligned((rows, 256), torch.bfloat16),
        "stream": aligned((rows, 256), torch.float32),
        "post_weight": None,
        "alpha": aligned(256, torch.float32),
        "beta": aligned(256, torch.float32),
        "next_weight": aligned(256, torch.bfloat16),
        "out": aligned((rows, 256), torch.bfloat16),
    }


def test_layers_of_equal_constants_share_a_kernel(shared, launched):
    first = shared.bind(SMALL)
    assert shared.bind(SMALL) is first
    assert shared.bind(SMALL, True) is not first
    assert [constants.role for constants, _ in launched] == ["both", "consume"]
    assert first.constants.boundary == SMALL


def test_what_is_bound_is_what_is_planned(launched):
    for tp, published in ((2, False), (4, False), (8, True)):
        box = LamportMailbox.stand_in(tp, CPU)[0]
        for order in ("mnnvl", "node-local"):
            deployment = Deployment(tp=tp, sum_order=order)
            AllReduceDualNorm.over(box, order).bind(attention_boundary(deployment, "sm_90a"), published)
            assert launched[-1][0] == fused_boundary(deployment, "sm_90a")


def test_it_launches_on_the_dual_norms_operands_and_the_mailboxs(shared, launched):
    operands = _operands(3)
    shared.bind(SMALL).run(**operands)
    given = [o for o in operands.values() if o is not None]
    passed = launched[-1][1]
    assert [a is b for a, b in zip(passed, [*given, *shared.mailbox.operands], strict=True)] == [True] * 9


def test_a_consumer_takes_no_partial_sum_and_wants_it_published(shared, launched):
    bound = shared.bind(SMALL, published=True)
    operands = _operands(3)
    with pytest.raises(ValueError, match=r"AllReduceDualNorm \(consume\) is to consume 3 rows, but none were"):
        bound.run(**operands)
    PartialPublisher(bound.constants, shared.mailbox).run(operands["partial"])
    assert launched[-1][0] == publisher_of(bound.constants)
    assert len(launched[-1][1]) == 3
    bound.run(**operands)
    assert launched[-1][1][0] is operands["stream"]
    assert len(launched[-1][1]) == 8


def test_a_kernel_that_publishes_is_refused_between_a_publish_and_its_consume(shared, launched):
    both, consumer = shared.bind(SMALL), shared.bind(SMALL, published=True)
    publisher = PartialPublisher(consumer.constants, shared.mailbox)
    publisher.run(_operands(2)["partial"])
    with pytest.raises(ValueError, match=r"AllReduceDualNorm \(both\) uses the mailbox while the 2 rows that Partial"):
        both.run(**_operands(2))
    with pytest.raises(ValueError, match=r"consume 1 rows, but PartialPublisher published 2"):
        consumer.run(**_operands(1))
    consumer.run(**_operands(2))
    both.run(**_operands(2))


def test_zero_rows_launch_nothing(shared, launched):
    both, consumer = shared.bind(SMALL), shared.bind(SMALL, published=True)
    before = len(launched)
    both.run(**_operands(0))
    consumer.run(**_operands(0))
    assert len(launched) == before


def test_rows_beyond_the_capacity_and_wrong_operands_launch_nothing(shared, launched):
    bound, before = shared.bind(SMALL), 1
    with pytest.raises(ValueError, match="5 rows; the mailbox has 4"):
        bound.run(**_operands(5))
    with pytest.raises(ValueError, match=r"^stream must be torch\.float32"):
        bound.run(**{**_operands(2), "stream": _operands(2)["out"]})
    with pytest.raises(ValueError, match=r"^post_weight must be None"):
        bound.run(**{**_operands(2), "post_weight": _operands(2)["next_weight"]})
    assert len(launched) == before


def test_what_does_not_fit_together_is_refused(shared, launched, monkeypatch):
    with pytest.raises(ValueError, match="the boundary has 8192 columns and the mailbox 256"):
        shared.bind(DualNormConstants(8192, 1e-8, next_eps=1e-5))
    with pytest.raises(ValueError, match="sum_order 'ring'; allowed: mnnvl, node-local"):
        AllReduceDualNorm.over(shared.mailbox, "ring")
    monkeypatch.setattr("muse_jit.ops.device.is_capturing", lambda: True)
    with pytest.raises(CompileDuringCapture, match="AllReduceDualNorm is being made during"):
        shared.bind(SMALL)
    assert launched == []
