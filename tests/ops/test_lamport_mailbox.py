"""The mailbox on the host: what it is made of, what its ranks must agree on, who publishes and who consumes."""

import subprocess
import sys
import textwrap

import pytest
import torch
from support.process import ROOT

from muse_jit.constants.mailbox import REPORTED, SENTINEL, Missing
from muse_jit.errors import RankMissing
from muse_jit.ops.lamport_mailbox import LamportMailbox

CPU = torch.device("cpu")


@pytest.fixture
def box():
    return LamportMailbox.stand_in(2, CPU, width=256, capacity=4)[0]


def test_a_stand_in_has_all_ranks_and_each_reaches_all():
    boxes = LamportMailbox.stand_in(4, CPU, width=256, capacity=4)
    addresses = [box.buffer.data_ptr() for box in boxes]
    for rank, box in enumerate(boxes):
        cyclic = addresses[rank:] + addresses[:rank]
        assert box.table.tolist() == [*cyclic, rank, 0]
        assert box.buffer.shape == (3, 4, 4, 256)
        assert bool((box.buffer.view(torch.int32) == SENTINEL).all())
        assert bool((box.buffer.view(torch.int16) == -32768).all())  # -0 each
        assert box.state.tolist() == [0] * 4
        assert [t.dtype for t in box.operands] == [torch.int64, torch.int32, torch.int32]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tp": 3}, "for 2, 4, 8, 16 ranks, not 3"),
        ({"tp": 2, "capacity": 0}, "1 to 4096 rows, not 0"),
        ({"tp": 2, "width": 12}, "a multiple of 8 columns, not 12"),
    ],
)
def test_impossible_mailboxes(fields, message):
    with pytest.raises(ValueError, match=message):
        LamportMailbox.stand_in(device=CPU, **fields)


def test_a_publish_and_its_consume(box):
    for rows in (1, 4, 2):
        box.mark_published(rows, "the GEMM")
        box.mark_consumed(rows, "the boundary")
    box.check_free("another layer")


def test_what_is_not_paired_is_refused_and_names_both(box):
    with pytest.raises(ValueError, match="the boundary is to consume 2 rows, but none were published"):
        box.mark_consumed(2, "the boundary")
    box.mark_published(2, "the GEMM")
    with pytest.raises(ValueError, match="the boundary is to consume 3 rows, but the GEMM published 2"):
        box.mark_consumed(3, "the boundary")
    with pytest.raises(ValueError, match="layer 7 uses the mailbox while the 2 rows that the GEMM published are not"):
        box.mark_published(1, "layer 7")
    with pytest.raises(ValueError, match="layer 8 uses the mailbox while the 2 rows"):
        box.check_free("layer 8")
    box.mark_consumed(2, "the boundary")


def test_rows_beyond_the_capacity_are_refused_and_change_nothing(box):
    with pytest.raises(ValueError, match="5 rows; the mailbox has 4"):
        box.mark_published(5, "the GEMM")
    box.check_free("the boundary")


def test_a_reset_repairs_an_aborted_step(box):
    box.mark_published(2, "the GEMM")
    box.buffer.zero_()
    box.state.fill_(-1)
    box.status.fill_(REPORTED | 1 << 16)
    box.reset()
    box.check_free("the next step")
    box.check()
    assert bool((box.buffer.view(torch.int32) == SENTINEL).all())
    assert box.state.tolist() == [0] * 4


def test_a_missing_rank_is_named(box):
    box.check()
    assert box.missing() is None
    box.status.fill_(REPORTED | 2 << 24 | 1 << 16 | 3)
    assert box.missing() == Missing(rank=1, row=3, generation=2)
    with pytest.raises(RankMissing, match=r"^rank 0 waited 600 s for row 3 of rank 1 \(generation 2\); its boundaries"):
        box.check()


RANK = """
import os, sys, torch, torch.distributed as dist
from muse_jit.ops import lamport_mailbox
from muse_jit.ops.lamport_mailbox import LamportMailbox

rank, world, place, arguments = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], eval(sys.argv[4])
dist.init_process_group("gloo", init_method=place, rank=rank, world_size=world)

def fake(shape, device, group, rank):
    size = (3, shape.tp, shape.capacity, shape.width)
    return torch.empty(size, dtype=torch.bfloat16), [4096 * (n + 1) for n in range(shape.tp)], 0, None

lamport_mailbox._symmetric_buffer = fake
arguments = {"width": 256, "capacity": 4, **arguments.get("all", {}), **arguments.get(rank, {})}
try:
    box = LamportMailbox(dist.group.WORLD, dist.group.WORLD, device=torch.device("cpu"), **arguments)
    print("made", box.table.tolist())
    if rank == 0:
        box.mark_published(1, "x")
    box.reset()
    box.check_free("y")
except ValueError as error:
    print(error)
sys.stdout.flush()
os._exit(0)  # gloo's threads may end the process in their own way
"""


def _ranks(tmp_path, world, arguments):
    """What each rank of a gloo group says of making a mailbox."""
    place = f"file://{tmp_path / 'meeting'}"
    code = textwrap.dedent(RANK)
    started = [
        subprocess.Popen([sys.executable, "-c", code, str(rank), str(world), place, repr(arguments)],
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
        for rank in range(world)
    ]  # fmt: skip
    said = [process.communicate(timeout=120) for process in started]
    assert [process.returncode for process in started] == [0] * world, said
    return [out.strip() for out, _ in said]


@pytest.mark.processes
def test_ranks_make_it_together(tmp_path):
    assert _ranks(tmp_path, 2, {}) == ["made [4096, 8192, 0, 0]", "made [8192, 4096, 1, 0]"]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("world", "arguments", "message"),
    [
        (2, {1: {"capacity": 8}}, "the ranks' mailboxes differ: capacity is 4 on rank 0 and 8 on rank 1"),
        (2, {0: {"width": 512}}, "the ranks' mailboxes differ: width is 512 on rank 0 and 256 on rank 1"),
        (
            2,
            {"all": {"terms": {"sum_order": "mnnvl"}}, 1: {"terms": {"sum_order": "node-local"}}},
            "the ranks' mailboxes differ: sum_order is 'mnnvl' on rank 0 and 'node-local' on rank 1",
        ),
        (2, {1: {"timeout_s": 1.0}}, "the ranks' mailboxes differ: timeout_s is 600.0 on rank 0 and 1.0 on rank 1"),
        (3, {}, "a mailbox is for 2, 4, 8, 16 ranks, not 3"),
        (
            2,
            {"all": {"transport": "multicast"}},
            "rank 0 has no mailbox: its symmetric memory has no multicast address (transport 'peer' needs none)",
        ),
    ],
)
def test_what_differs_is_said_on_every_rank_in_the_same_words(tmp_path, world, arguments, message):
    assert _ranks(tmp_path, world, arguments) == [message] * world
