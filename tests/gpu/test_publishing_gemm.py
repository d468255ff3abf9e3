"""The publishing GEMM on one GPU that plays all ranks: what it writes, what arrives, what the boundary makes of it."""

import pathlib
import sys

import pytest
import torch
from support.rows import same_bits

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import cases
from test_all_reduce_dual_norm import DEVICE, Ranks, _stream

from muse_jit.constants.gemm_shapes import OPROJ
from muse_jit.constants.mailbox import SENTINEL

pytestmark = pytest.mark.gpu

ROWS = (1, 2, 7, 8, 16, 31, 32, 64)


class Projections:
    """o_proj of every rank over the mailboxes of `ranks`, and the same without one."""

    def __init__(self, ranks, shape=OPROJ, rows=ROWS):
        from muse_jit.ops.unpooler import Unpooler

        self.ranks, self.k = ranks, 8192 // ranks.tp
        generator = torch.Generator(device=DEVICE).manual_seed(ranks.tp)
        self.weights = [
            (torch.randn(8192, self.k, generator=generator, device=DEVICE) * self.k**-0.5).bfloat16()
            for _ in ranks.boxes
        ]
        both = zip(self.weights, ranks.boxes, strict=True)
        self.publishing = [Unpooler(weight, box, shape=shape, rows=rows) for weight, box in both]
        self.plain = [Unpooler(weight, None, shape=shape, rows=rows) for weight in self.weights]

    def inputs(self, rows, seed):
        generator = torch.Generator(device=DEVICE).manual_seed(seed)
        made = [torch.randn(rows, self.k, generator=generator, device=DEVICE).bfloat16() for _ in self.weights]
        for x in made[::2]:
            x[rows // 2] = 0  # whose results are zeros, of either sign
        return made

    def outs(self, rows):
        return [torch.full((rows, 8192), float("nan"), dtype=torch.bfloat16, device=DEVICE) for _ in self.weights]


def _ranks(tp, **options):
    ranks = Ranks(tp, "mnnvl", cases.BOUNDARY, published=True, **options)
    ranks.publishers = []
    return ranks


def _step(ranks, projections, rows, seed):
    """Elements that differ: the GEMM's output from that without a mailbox, and the boundary's from the emulated one."""
    xs, outs, plain = projections.inputs(rows, seed), projections.outs(rows), projections.outs(rows)
    streams = [_stream(rows, seed) for _ in range(ranks.tp)]
    normed = [torch.full_like(out, float("nan")) for out in outs]
    before = streams[0].clone()
    for gemm, x, out in zip(projections.publishing, xs, outs, strict=True):
        gemm.run(x, out)
    ranks.run(outs, streams, normed)
    for gemm, x, out in zip(projections.plain, xs, plain, strict=True):
        gemm.run(x, out)
    new, expected = ranks.expected(plain, before)
    found = sum(same_bits(a, b) for a, b in zip(outs, plain, strict=True))
    return found + sum(same_bits(s, new) + same_bits(o, expected) for s, o in zip(streams, normed, strict=True))


@pytest.mark.parametrize("wait_last", [False, True])
@pytest.mark.parametrize("tp", [2, 4, 8])
def test_what_is_published_is_what_is_written_and_what_is_summed(tp, wait_last):
    ranks = _ranks(tp, wait_last=wait_last)
    projections = Projections(ranks)
    for turn, rows in enumerate(ROWS * 3):  # more than the generations
        assert _step(ranks, projections, rows, turn) == 0
    ranks.check()


@pytest.mark.parametrize(("rows", "shape"), cases.PUBLISHING_SHAPES, ids=str)
def test_every_way_to_divide_the_work_publishes(rows, shape):
    ranks = _ranks(8)
    projections = Projections(ranks, shape, [rows])
    for turn in range(4):
        assert _step(ranks, projections, rows - turn, turn) == 0
    ranks.check()


def test_only_the_rows_of_x_are_published():
    ranks = _ranks(2)
    projections = Projections(ranks)
    out = projections.outs(5)[0]
    projections.publishing[0].run(projections.inputs(5, 0)[0], out)
    torch.cuda.synchronize()
    for box in ranks.boxes:
        words = box.buffer.view(torch.int32)
        assert (words[0, 0, :5] != SENTINEL).all()
        assert (words[0, 0, 5:] == SENTINEL).all()
        assert (words[0, 1] == SENTINEL).all()
        assert (words[1:] == SENTINEL).all()
    ranks.reset()


def test_zero_rows_publish_nothing_and_pairs_are_watched():
    ranks = _ranks(2)
    projections = Projections(ranks)
    gemm = projections.publishing[0]
    nothing = [torch.empty(0, width, dtype=torch.bfloat16, device=DEVICE) for width in (4096, 8192)]
    gemm.run(*nothing)
    ranks.boxes[0].check_free("a test")
    gemm.run(projections.inputs(3, 0)[0], projections.outs(3)[0])
    with pytest.raises(ValueError, match="Unpooler uses the mailbox while the 3 rows that Unpooler published"):
        gemm.run(projections.inputs(3, 0)[0], projections.outs(3)[0])
    ranks.reset()
    assert _step(ranks, projections, 3, 1) == 0


def test_replays_of_a_graph_of_layers_keep_rotating():
    ranks = _ranks(8)
    projections = Projections(ranks)
    rows, layers = 8, 5
    xs, outs = projections.inputs(rows, 0), projections.outs(rows)
    streams, normed = [_stream(rows, 0) for _ in range(8)], projections.outs(rows)
    first = streams[0].clone()

    def step():
        for _ in range(layers):
            for gemm, x, out in zip(projections.publishing, xs, outs, strict=True):
                gemm.run(x, out)
            ranks.run(outs, streams, normed)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for turn in range(300):
        for x, new in zip(xs, projections.inputs(rows, turn), strict=True):
            x.copy_(new)
        for stream in streams:
            stream.copy_(first)
        graph.replay()
        plain = projections.outs(rows)
        for gemm, x, out in zip(projections.plain, xs, plain, strict=True):
            gemm.run(x, out)
        stream = first
        for _ in range(layers):
            stream, expected = ranks.expected(plain, stream)
        assert sum(same_bits(s, stream) + same_bits(o, expected) for s, o in zip(streams, normed, strict=True)) == 0
    ranks.check()
