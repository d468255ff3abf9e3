"""The fused all-reduce on one GPU, which plays all ranks: bits, replays, the watchdog.

With `published`, every rank publishes before the first one consumes, so one stream will do. Without, a kernel waits
for kernels of other ranks, so each rank has a stream, and steps have few rows, for all of them must run at once.
"""

import os
import pathlib
import sys
import time

import pytest
import torch
from support.rows import KINDS, rows_of, same_bits
from support.stock_sum import stock_sum

# A hardware queue for each stream: behind another rank's kernel, one that it waits for would never start. It counts
# when CUDA is initialised, which no test module does at its import.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import cases

from muse_jit.errors import RankMissing

pytestmark = pytest.mark.gpu

TPS, ORDERS = (2, 4, 8, 16), ("mnnvl", "node-local")
ROWS = (1, 2, 3, 8, 23, 24, 25, 33, 64)
DEVICE = "cuda:0"


def _parameters(c, seed=0):
    """post_weight, alpha, beta, next_weight, as a trained model has them."""
    generator = torch.Generator(device=DEVICE).manual_seed(seed)

    def vector(low, high, dtype):
        return (torch.rand(c.hidden, generator=generator, device=DEVICE) * (high - low) + low).to(dtype)

    weights = [vector(-0.5, 0.5, torch.bfloat16) for _ in range(2)]
    gates = [vector(0.0316, 1.0, torch.float32), vector(0.0, 1.0, torch.float32)]
    return weights[0] if c.post_weight != "none" else None, *gates, weights[1]


class Ranks:
    """All ranks of a tensor parallel group on one GPU."""

    def __init__(self, tp, order, boundary, *, published, timeout_s=cases.FUSED_TIMEOUT_S, wait_last=False):
        from muse_jit.ops.all_reduce_dual_norm import AllReduceDualNorm, PartialPublisher
        from muse_jit.ops.dual_norm import DualNorm
        from muse_jit.ops.lamport_mailbox import LamportMailbox

        self.tp, self.order, self.published = tp, order, published
        self.boxes = LamportMailbox.stand_in(tp, torch.device(DEVICE), timeout_s=timeout_s)
        shared = [AllReduceDualNorm.over(box, order) for box in self.boxes]
        self.bound = [one.bind(boundary, published, wait_last=wait_last) for one in shared]
        self.publishers = [PartialPublisher(self.bound[0].constants, box) for box in self.boxes] if published else []
        self.alone = DualNorm(boundary, torch.device(DEVICE))
        self.parameters = _parameters(boundary)
        self.streams = [torch.cuda.Stream() for _ in range(tp)]

    def run(self, partials, streams, outs):
        """One boundary of every rank, streams in place."""
        post_weight, alpha, beta, next_weight = self.parameters

        def boundary(rank):
            operands = (partials[rank], streams[rank], post_weight, alpha, beta, next_weight, outs[rank])
            self.bound[rank].run(*operands)

        if self.published:
            for publisher, partial in zip(self.publishers, partials, strict=bool(self.publishers)):
                publisher.run(partial)
            for rank in range(self.tp):
                boundary(rank)
            return
        current = torch.cuda.current_stream()
        begun = current.record_event()
        for rank, stream in enumerate(self.streams):
            stream.wait_event(begun)
            with torch.cuda.stream(stream):
                boundary(rank)
        for stream in self.streams:
            current.wait_event(stream.record_event())

    def expected(self, partials, stream):
        """(new stream, out), by the emulated all-reduce and the dual norm alone."""
        stream, total = stream.clone(), stock_sum(partials, self.order)
        post_weight, alpha, beta, next_weight = self.parameters
        out = torch.empty_like(total)
        self.alone.run(total, stream, post_weight, alpha, beta, next_weight, out)
        return stream, out

    def differing(self, partials, stream):
        """Elements of all ranks that differ after one boundary."""
        streams = [stream.clone() for _ in range(self.tp)]
        outs = [torch.full_like(partials[0], float("nan")) for _ in range(self.tp)]
        self.run(partials, streams, outs)
        new, out = self.expected(partials, stream)
        return sum(same_bits(s, new) + same_bits(o, out) for s, o in zip(streams, outs, strict=True))

    def check(self):
        torch.cuda.synchronize()
        for box in self.boxes:
            box.check()

    def reset(self):
        for box in self.boxes:
            box.reset()


def _partials(tp, rows, seed, first=0):
    """A kind of rows for each rank, beginning with another one each time."""
    kinds = [KINDS[(first + p) % len(KINDS)] if first < len(KINDS) else "normal" for p in range(tp)]
    return [rows_of(kind, rows, 8192, torch.bfloat16, 100 * seed + p) for p, kind in enumerate(kinds)]


def _stream(rows, seed):
    return rows_of(KINDS[seed % 3], rows, 8192, torch.float32, 7000 + seed)


@pytest.mark.parametrize("wait_last", [False, True])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("tp", TPS)
def test_published_sums_equal_the_stock_order(tp, order, wait_last):
    ranks = Ranks(tp, order, cases.BOUNDARY, published=True, wait_last=wait_last)
    for seed, rows in enumerate(ROWS):
        for first in range(len(KINDS) + 1):
            assert ranks.differing(_partials(tp, rows, seed, first), _stream(rows, seed)) == 0, (rows, first)
    ranks.check()


@pytest.mark.parametrize("boundary", [cases.BOUNDARY, cases.NO_PDL], ids=["pdl", "no pdl"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("tp", TPS)
def test_publishing_and_consuming_in_one_kernel(tp, order, boundary):
    ranks = Ranks(tp, order, boundary, published=False)
    for seed, rows in enumerate((1, 2, 3, 4) if tp < 16 else (1, 2)):
        for first in range(len(KINDS) + 1):
            assert ranks.differing(_partials(tp, rows, seed, first), _stream(rows, seed)) == 0, (rows, first)
    ranks.check()


@pytest.mark.parametrize("name", cases.BOUNDARIES)
@pytest.mark.parametrize("published", [False, True])
def test_the_other_boundaries(name, published):
    ranks = Ranks(2, "mnnvl", cases.BOUNDARIES[name], published=published)
    for seed, rows in enumerate((1, 5, 25, 64) if published else (1, 4)):
        assert ranks.differing(_partials(2, rows, seed, 9), _stream(rows, seed)) == 0
    ranks.check()


def _graph(ranks, rows, layers, seed):
    """A graph of `layers` boundaries in a chain by the stream, and its tensors."""
    partials = [[torch.empty(rows, 8192, dtype=torch.bfloat16, device=DEVICE) for _ in range(ranks.tp)]
                for _ in range(layers)]  # fmt: skip
    streams = [torch.empty(rows, 8192, device=DEVICE) for _ in range(ranks.tp)]
    outs = [[torch.empty_like(p) for p in layer] for layer in partials]
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=side):
        for layer, out in zip(partials, outs, strict=True):
            ranks.run(layer, streams, out)
    return graph, partials, streams, outs


def _replay(ranks, captured, seed):
    """One replay on new data; elements that differ."""
    graph, partials, streams, outs = captured
    rows = streams[0].shape[0]
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    for layer in partials:
        for partial in layer:
            partial.normal_(generator=generator)
            partial[torch.rand(partial.shape, generator=generator, device=DEVICE) < 0.01] = -0.0
    begin = torch.randn(rows, 8192, generator=generator, device=DEVICE)
    for stream in streams:
        stream.copy_(begin)
    graph.replay()
    differ, stream = 0, begin
    for layer, out in zip(partials, outs, strict=True):
        stream, expected = ranks.expected(layer, stream)
        differ += sum(same_bits(o, expected) for o in out)
    return differ + sum(same_bits(s, stream) for s in streams)


@pytest.mark.parametrize("tp", TPS)
def test_thousands_of_replays_with_changing_rows_and_data(tp):
    """2000 replays of three boundaries: 6000 steps of row 0, generations rotating on the device."""
    ranks = Ranks(tp, "mnnvl", cases.BOUNDARY, published=True)
    captured = {rows: _graph(ranks, rows, 3, rows) for rows in (1, 7, 64, 30)}
    for turn in range(2000):
        rows = (1, 7, 64, 1, 30, 7)[turn * 7919 % 6]
        assert _replay(ranks, captured[rows], turn) == 0, turn
    ranks.check()


@pytest.mark.parametrize("tp", [2, 4])
def test_replays_of_one_kernel_on_concurrent_branches(tp):
    ranks = Ranks(tp, "mnnvl", cases.NO_PDL, published=False)
    captured = {rows: _graph(ranks, rows, 3, rows) for rows in (1, 2, 4)}
    for turn in range(1000):
        assert _replay(ranks, captured[(1, 2, 4)[turn % 3]], turn) == 0, turn
    ranks.check()


@pytest.mark.parametrize("published", [False, True])
def test_a_rank_that_never_comes_is_reported_and_a_reset_repairs_it(published):
    ranks = Ranks(2, "mnnvl", cases.BOUNDARY, published=published, timeout_s=cases.WATCHDOG_S)
    rows = 64
    for seed in range(4):  # generation 1 from now on
        assert ranks.differing(_partials(2, 2, seed, 9), _stream(2, seed)) == 0
    partial, stream = _partials(2, rows, 5, 9)[0], _stream(rows, 5)
    out = torch.zeros_like(partial)

    def alone():
        if published:
            ranks.publishers[0].run(partial)
        post_weight, alpha, beta, next_weight = ranks.parameters
        began = time.monotonic()
        ranks.bound[0].run(partial, stream, post_weight, alpha, beta, next_weight, out)
        torch.cuda.synchronize()
        return time.monotonic() - began

    assert cases.WATCHDOG_S * 0.9 < alone() < cases.WATCHDOG_S + 2
    assert bool(out.isnan().all())
    assert bool(stream.isnan().all())
    with pytest.raises(RankMissing, match=r"^rank 0 waited 1 s for row \d+ of rank 1 \(generation \d\)"):
        ranks.boxes[0].check()
    ranks.boxes[1].check()  # it was told nothing, and knows nothing
    out.zero_()
    stream = _stream(rows, 6)
    assert alone() < 0.2  # nobody waits again
    assert bool(out.isnan().all())
    assert bool(stream.isnan().all())
    ranks.reset()
    for seed in range(4):
        some = rows if published else 3
        assert ranks.differing(_partials(2, some, seed, 9), _stream(some, seed)) == 0
    ranks.check()


def test_an_aborted_capture_is_repaired_by_a_reset():
    ranks = Ranks(2, "mnnvl", cases.BOUNDARY, published=True)
    partials, stream = _partials(2, 4, 1, 9), _stream(4, 1)

    def step():
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            ranks.publishers[0].run(partials[0])
            raise KeyError("the step is aborted")

    with pytest.raises(KeyError):
        step()
    with pytest.raises(ValueError, match="the 4 rows that PartialPublisher published are not consumed"):
        ranks.publishers[0].run(partials[0])
    ranks.reset()
    assert ranks.differing(partials, stream) == 0


def test_pairing_and_capacity_are_checked_on_the_host():
    ranks = Ranks(2, "mnnvl", cases.BOUNDARY, published=True)
    post_weight, alpha, beta, next_weight = ranks.parameters

    def consume(rows):
        partial = torch.zeros(rows, 8192, dtype=torch.bfloat16, device=DEVICE)
        stream = torch.zeros(rows, 8192, device=DEVICE)
        ranks.bound[0].run(partial, stream, post_weight, alpha, beta, next_weight, torch.empty_like(partial))

    with pytest.raises(ValueError, match="to consume 2 rows, but none were published"):
        consume(2)
    with pytest.raises(ValueError, match="65 rows; the mailbox has 64"):
        consume(65)
    with pytest.raises(ValueError, match="65 rows; the mailbox has 64"):
        ranks.publishers[0].run(torch.zeros(65, 8192, dtype=torch.bfloat16, device=DEVICE))
    consume(0)
    ranks.publishers[0].run(torch.zeros(3, 8192, dtype=torch.bfloat16, device=DEVICE))
    with pytest.raises(ValueError, match="to consume 2 rows, but PartialPublisher published 3"):
        consume(2)
    ranks.reset()
    assert ranks.differing(_partials(2, 2, 1, 9), _stream(2, 1)) == 0


def test_a_run_allocates_nothing():
    ranks = Ranks(2, "mnnvl", cases.BOUNDARY, published=True)
    partials = _partials(2, 8, 1, 9)
    streams, outs = [_stream(8, 1) for _ in range(2)], [torch.empty_like(p) for p in partials]
    ranks.run(partials, streams, outs)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    ranks.run(partials, streams, outs)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
