"""The Unpooler's own logic on the CPU, with kernels that compute in torch: buckets, preparation, refusals."""

import types

import pytest
import torch

from muse_jit.constants.gemm_shapes import BUCKETS, OPROJ, UNPOOLER, gemm_constants
from muse_jit.constants.small_m_gemm import GemmShape
from muse_jit.errors import CompileDuringCapture, ConstantsError
from muse_jit.ops import device, unpooler
from muse_jit.ops.lamport_mailbox import LamportMailbox
from muse_jit.ops.o_projection import OProjection
from muse_jit.ops.unpooler import Unpooler
from muse_jit.plan import Deployment, o_proj_gemm

N, K = 48, 96


class _Service:
    """Kernels that remember their launches; only what was ensured is in memory."""

    def __init__(self):
        self.target = types.SimpleNamespace(arch="sm_90a")
        self.ensured, self.prepared, self.launched = [], [], []
        self.mailbox_operands = []
        self.memory = {}

    def in_memory(self, constants):
        return constants in self.memory

    def ensure(self, wanted):
        self.ensured.append(list(wanted))
        self.memory |= {c: self._kernel(c) for c in wanted}

    def get(self, constants):
        return self.memory[constants]

    def _kernel(self, constants):
        def function(x, weight, out, *mailbox):
            assert len(mailbox) == (2 if constants.publish_tp else 0)
            self.launched.append((constants.rows, x.shape[0], weight.data_ptr(), weight.requires_grad))
            self.mailbox_operands.append(mailbox)
            torch.mm(x, weight.t(), out=out)

        return types.SimpleNamespace(function=function, prepare=lambda index: self.prepared.append((constants, index)))


@pytest.fixture
def service(monkeypatch):
    made = _Service()
    monkeypatch.setattr(unpooler, "_place", lambda place: (made, 3, True))
    return made


def _weight(n=N, k=K):
    return torch.randn(n, k).bfloat16()


def _operands(rows, n=N, k=K):
    return torch.randn(rows, k).bfloat16(), torch.full((rows, n), float("nan")).bfloat16()


def test_all_buckets_of_the_rows_are_ensured_together_and_prepared_without_a_launch(service):
    gemm = Unpooler(_weight())
    expected = gemm_constants(N, K, BUCKETS, "sm_90a", pdl=True)
    assert service.ensured == [list(expected)]
    assert service.prepared == [(c, 3) for c in expected]
    assert gemm.constants == expected
    assert service.launched == []


def test_the_next_layer_finds_them_in_memory(service):
    for _ in range(3):
        Unpooler(_weight(), None, UNPOOLER, (1, 16))
    assert [[c.rows for c in asked] for asked in service.ensured] == [[8, 16]]
    assert len(service.prepared) == 6


@pytest.mark.parametrize("rows", [(1, 2, 8, 64), (64, 8)])
def test_a_launch_takes_the_smallest_bucket_that_was_built(service, rows):
    gemm = Unpooler(_weight(), rows=rows)
    assert gemm.max_rows == 64
    for count in range(1, 65):
        x, out = _operands(count)
        assert gemm.run(x, out) is out
        assert torch.equal(out, torch.mm(x, gemm.weight.t()))
        assert service.launched[-1][:2] == (8 if count <= 8 else 64, count)


def test_the_weight_is_kept_and_not_copied(service):
    weight = torch.nn.Parameter(_weight())
    gemm = Unpooler(weight, rows=(1,))
    assert gemm.weight is weight
    x, out = _operands(1)
    gemm.run(x, out)
    assert service.launched == [(8, 1, weight.data_ptr(), False)]


def test_zero_rows_launch_nothing(service):
    gemm = Unpooler(_weight(), rows=(1,))
    x, out = _operands(0)
    assert gemm.run(x, out) is out
    assert service.launched == []


def test_more_rows_than_were_built_are_refused(service):
    gemm = Unpooler(_weight(), rows=(1, 9))
    for count, fine in ((16, True), (17, False), (65, False)):
        x, out = _operands(count)
        if fine:
            gemm.run(x, out)
        else:
            with pytest.raises(ValueError, match=rf"^x must have at most the 16 rows .* built for, not {count}$"):
                gemm.run(x, out)
    assert [launch[:2] for launch in service.launched] == [(16, 16)]


def _shifted(shape):
    return torch.zeros(shape[0] * shape[1] + 1).bfloat16()[1:].view(shape)


@pytest.mark.parametrize(
    ("name", "make", "message"),
    [
        ("x", lambda: torch.ones(2, K), "must be torch.bfloat16, not torch.float32"),
        ("x", lambda: torch.ones(2, K + 32).bfloat16(), rf"must have the shape \(2, {K}\), not \(2, {K + 32}\)"),
        ("x", lambda: torch.ones(K).bfloat16(), "must have the shape"),
        ("x", lambda: torch.ones(()).bfloat16(), "must have the shape"),
        ("x", lambda: torch.ones(K, 2).bfloat16().t(), "must be contiguous"),
        ("x", lambda: _shifted((2, K)), "must be aligned to 16 bytes"),
        ("x", lambda: torch.ones(2, K, device="meta").bfloat16(), "must be on cpu, not on meta"),
        ("out", lambda: torch.ones(2, N), "must be torch.bfloat16"),
        ("out", lambda: torch.ones(3, N).bfloat16(), rf"must have the shape \(2, {N}\), not \(3, {N}\)"),
        ("out", lambda: torch.ones(N, 2).bfloat16().t(), "must be contiguous"),
        ("out", lambda: _shifted((2, N)), "must be aligned to 16 bytes"),
        ("out", lambda: torch.ones(2, N, device="meta").bfloat16(), "must be on cpu, not on meta"),
    ],
)
def test_wrong_operands_are_named_and_nothing_is_launched(service, name, make, message):
    gemm = Unpooler(_weight(), rows=(1,))
    x, out = _operands(2)
    operands = {"x": x, "out": out, name: make()}
    with pytest.raises(ValueError, match=f"^{name} {message}"):
        gemm.run(**operands)
    assert service.launched == []


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.ones(N, K), "^weight must be torch.bfloat16"),
        (torch.ones(N).bfloat16(), r"^weight must be a matrix \[N, K\], not of the shape \(48,\)"),
        (torch.ones(K, N).bfloat16().t(), "^weight must be contiguous"),
        (_shifted((N, K)), "^weight must be aligned to 16 bytes"),
        (torch.ones(N + 8, K).bfloat16(), "^n is 56; the small-M GEMM needs a positive multiple of 16"),
        (torch.ones(N, K + 8).bfloat16(), "^k is 104; the small-M GEMM needs a positive multiple of 32"),
    ],
)
def test_wrong_weights_are_refused(service, weight, message):
    with pytest.raises(ValueError, match=message):
        Unpooler(weight)
    assert service.ensured == []


def test_a_weight_elsewhere_is_refused():
    with pytest.raises(ValueError, match=r"^weight must be on a CUDA device, not on cpu"):
        Unpooler(_weight())


@pytest.mark.parametrize(("rows", "message"), [((), "rows is empty"), ((0,), "rows is 0"), ((1, 65), "rows is 65")])
def test_wrong_row_counts_are_refused(service, rows, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        Unpooler(_weight(), rows=rows)


def test_one_shape_for_all_buckets(service):
    gemm = Unpooler(_weight(N, 1024), None, GemmShape(48, 3, 1), (1, 16))
    assert [(c.rows, c.tile_n, c.warps, c.m_tiles) for c in gemm.constants] == [(8, 48, 3, 1), (16, 48, 3, 1)]
    with pytest.raises(ConstantsError, match="tile_n = 32"):
        Unpooler(_weight(), None, GemmShape(32, 2, 1), (1,))


def test_what_is_planned_is_what_is_launched(service):
    gemm = Unpooler(_weight(8192, 1024), LamportMailbox.stand_in(8, torch.device("cpu"))[0], OPROJ)
    assert gemm.constants == o_proj_gemm(Deployment(tp=8), "sm_90a")


@pytest.fixture
def mailbox():
    return LamportMailbox.stand_in(2, torch.device("cpu"), width=N)[1]


def test_a_publishing_launch_takes_the_mailboxs_table_and_state(service, mailbox):
    gemm = Unpooler(_weight(), mailbox, rows=(1, 16))
    assert [(c.rows, c.publish_tp, c.transport, c.capacity) for c in gemm.constants] == [
        (8, 2, "peer", 64),
        (16, 2, "peer", 64),
    ]
    assert service.ensured == [list(gemm.constants)]
    x, out = _operands(9)
    assert gemm.run(x, out) is out
    assert torch.equal(out, torch.mm(x, gemm.weight.t()))
    ((table, state),) = service.mailbox_operands
    assert table is mailbox.table
    assert state is mailbox.state
    Unpooler(_weight(), rows=(1,)).run(*_operands(1))
    assert service.mailbox_operands[1] == ()


def test_a_run_marks_its_rows_as_published_until_they_are_consumed(service, mailbox):
    gemm = Unpooler(_weight(), mailbox, rows=(1,))
    mailbox.check_free("the test")
    for rows in (3, 8):
        gemm.run(*_operands(rows))
        with pytest.raises(ValueError, match=f"consume 5 rows, but Unpooler published {rows}"):
            mailbox.mark_consumed(5, "the test")
        mailbox.mark_consumed(rows, "the test")
    assert [launch[1] for launch in service.launched] == [3, 8]


def test_zero_rows_publish_nothing(service, mailbox):
    gemm = Unpooler(_weight(), mailbox, rows=(1,))
    x, out = _operands(0)
    assert gemm.run(x, out) is out
    assert service.launched == []
    mailbox.check_free("the test")
    with pytest.raises(ValueError, match="none were published"):
        mailbox.mark_consumed(1, "the test")


def test_rows_that_nobody_consumed_are_not_published_over(service, mailbox):
    first, second = (Unpooler(_weight(), mailbox, rows=(1,)) for _ in range(2))
    first.run(*_operands(4))
    for gemm in (first, second):
        with pytest.raises(ValueError, match="Unpooler uses the mailbox while the 4 rows that Unpooler published"):
            gemm.run(*_operands(2))
    assert [launch[1] for launch in service.launched] == [4]
    mailbox.mark_consumed(4, "the test")
    second.run(*_operands(2))
    assert [launch[1] for launch in service.launched] == [4, 2]


def test_what_is_refused_is_not_marked_as_published(service, mailbox):
    gemm = Unpooler(_weight(), mailbox, rows=(1,))
    with pytest.raises(ValueError, match=r"^x must have at most the 8 rows"):
        gemm.run(*_operands(9))
    with pytest.raises(ValueError, match=r"^out must have the shape \(2, 48\)"):
        gemm.run(_operands(2)[0], _operands(3)[1])
    mailbox.check_free("the test")
    assert service.launched == []


def test_a_mailbox_of_another_width_is_refused(service):
    other = LamportMailbox.stand_in(2, torch.device("cpu"), width=64)[0]
    with pytest.raises(ValueError, match=r"^n is 48; the mailbox that it is published into is 64 wide$"):
        Unpooler(_weight(), other)
    assert service.ensured == []


def test_a_mailbox_of_fewer_rows_than_a_bucket_is_refused(service):
    small = LamportMailbox.stand_in(2, torch.device("cpu"), width=N, capacity=16)[0]
    assert Unpooler(_weight(), small, rows=(16,)).max_rows == 16
    with pytest.raises(ConstantsError, match="capacity is 16; it must be from rows = 32"):
        Unpooler(_weight(), small, rows=(17,))


def test_a_mailbox_on_another_device_is_refused(service, mailbox):
    mailbox.device = torch.device("cuda", 1)
    with pytest.raises(ValueError, match=r"^the mailbox is on cuda:1, the weight on cpu$"):
        Unpooler(_weight(), mailbox)
    assert service.ensured == []


def test_o_proj_publishes_into_the_mailbox_that_it_is_given(service):
    box = LamportMailbox.stand_in(2, torch.device("cpu"))[0]
    projection = OProjection(_weight(8192, 64), (1,), box)
    assert projection.gemm.mailbox is box
    assert projection.gemm.shape == OPROJ
    x, out = _operands(2, 8192, 64)
    assert projection.run(x, out) is out
    assert projection.run(x[:0], out[:0]).shape == (0, 8192)
    mailbox_operands = service.mailbox_operands[0]
    assert mailbox_operands[0] is box.table
    box.mark_consumed(2, "the test")
    assert len(service.launched) == 1


def test_during_a_capture_none_is_made(service, monkeypatch):
    monkeypatch.setattr(device, "is_capturing", lambda: True)
    with pytest.raises(CompileDuringCapture, match="Unpooler is being made during a CUDA graph capture"):
        Unpooler(_weight())


def test_o_proj_takes_the_packages_gemm_where_it_is_asked_to(service):
    weight = _weight(8192, 64)
    projection = OProjection(weight, (1, 20), package_gemm=True)
    assert projection.gemm.shape == OPROJ
    assert [c.rows for c in projection.gemm.constants] == [8, 32]
    assert service.launched == []
    x, out = _operands(20, 8192, 64)
    assert projection.run(x, out) is out
    assert [launch[:2] for launch in service.launched] == [(32, 20)]
    assert torch.equal(out, torch.mm(x, weight.t()))
    with pytest.raises(ValueError, match=r"^x must have at most the 32 rows"):
        projection.run(*_operands(33, 8192, 64))
    assert OProjection(weight, (1,)).gemm is None
