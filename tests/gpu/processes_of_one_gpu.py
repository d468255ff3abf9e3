"""A torchrun job for test_processes_of_one_gpu.py: ranks that are processes, on one GPU, over real symmetric memory.

    torchrun --standalone --nproc-per-node N tests/gpu/processes_of_one_gpu.py BOUNDARIES REPLAYS

The GPU runs one process at a time, so a rank that polls does so for its time slice while the others wait for theirs: a
boundary takes milliseconds, and ranks are as skewed as can be. NCCL refuses ranks that share a GPU; gloo does not care.
Rank 0 prints one line of JSON: what was run, and how many elements of all ranks differ from the emulated stock order.
"""

import faulthandler
import json
import os
import pathlib
import random
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "gpu"), str(ROOT)]

import cases
import torch
import torch.distributed as dist
from support.rows import same_bits
from support.stock_sum import stock_sum

from muse_jit.ops.all_reduce_dual_norm import AllReduceDualNorm
from muse_jit.ops.dual_norm import DualNorm
from muse_jit.ops.unpooler import OPROJ, Unpooler

H = 8192
DEVICE = torch.device("cuda", 0)
ROWS = (1, 2, 8, 16, 33, 64)
LAYERS = 3


class Job:
    """One rank: a boundary that publishes itself and one behind the publishing GEMM, in turn over one mailbox."""

    def __init__(self):
        dist.init_process_group("gloo")
        self.tp, self.rank, group = dist.get_world_size(), dist.get_rank(), dist.group.WORLD
        self.shared = AllReduceDualNorm(
            group, group, device=DEVICE, sum_order="mnnvl", timeout_s=cases.PROCESSES_TIMEOUT_S
        )
        self.itself, self.behind = (self.shared.bind(cases.BOUNDARY, published) for published in (False, True))
        self.alone = DualNorm(cases.BOUNDARY, DEVICE)
        self.k = H // self.tp
        self.weights = [self.random(7000 + rank, (H, self.k)) * self.k**-0.5 for rank in range(self.tp)]
        self.gemm = Unpooler(self.weights[self.rank], self.shared.mailbox, shape=OPROJ)
        self.plain = [Unpooler(weight, None, shape=OPROJ) for weight in self.weights]
        self.alpha, self.beta = (torch.rand(H, generator=_seeded(seed), device=DEVICE) for seed in (1, 2))
        self.weight = self.random(3, (H,))

    def random(self, seed, shape):
        return torch.randn(shape, generator=_seeded(seed), device=DEVICE).bfloat16()

    def normed(self, norm, partial, stream):
        out = torch.full_like(partial, float("nan"))
        norm.run(partial, stream, None, self.alpha, self.beta, self.weight, out)
        return out

    def differing(self, rows, seed, *, gemm):
        """Elements of this rank that differ after one boundary."""
        inputs = [self.random(seed + rank, (rows, self.k if gemm else H)) for rank in range(self.tp)]
        stream = torch.randn(rows, H, generator=_seeded(seed), device=DEVICE)
        wanted_stream = stream.clone()
        partials = [one.run(x, self.empty(rows)) for one, x in zip(self.plain, inputs, strict=True)] if gemm else inputs
        wanted = self.normed(self.alone, stock_sum(partials, "mnnvl"), wanted_stream)
        torch.cuda.synchronize()
        partial = self.gemm.run(inputs[self.rank], self.empty(rows)) if gemm else inputs[self.rank]
        out = self.normed(self.behind if gemm else self.itself, partial, stream)
        return same_bits(out, wanted) + same_bits(stream, wanted_stream)

    def empty(self, rows):
        return torch.full((rows, H), float("nan"), dtype=torch.bfloat16, device=DEVICE)

    def replays(self, count, rows=8):
        """A graph of layers with both kinds of boundary, replayed on changing inputs: elements that differ."""
        x, partial = self.random(0, (rows, self.k)), self.random(0, (rows, H))
        stream, produced = torch.zeros(rows, H, device=DEVICE), self.empty(rows)
        outs = [self.empty(rows) for _ in range(2)]

        def step():
            for _ in range(LAYERS):
                self.itself.run(partial, stream, None, self.alpha, self.beta, self.weight, outs[0])
                self.gemm.run(x, produced)
                self.behind.run(produced, stream, None, self.alpha, self.beta, self.weight, outs[1])

        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        differ = 0
        for turn in range(count):
            seed = 1000 * (turn + 1)
            xs = [self.random(seed + rank, (rows, self.k)) for rank in range(self.tp)]
            partials = [self.random(seed + 500 + rank, (rows, H)) for rank in range(self.tp)]
            x.copy_(xs[self.rank])
            partial.copy_(partials[self.rank])
            stream.fill_(1.0)
            graph.replay()
            wanted_stream = torch.ones(rows, H, device=DEVICE)
            sums = [stock_sum(partials, "mnnvl")]
            sums.append(
                stock_sum([one.run(x_, self.empty(rows)) for one, x_ in zip(self.plain, xs, strict=True)], "mnnvl")
            )
            for _ in range(LAYERS):
                wanted = [self.normed(self.alone, one, wanted_stream) for one in sums]
            differ += same_bits(stream, wanted_stream)
            differ += sum(same_bits(out, right) for out, right in zip(outs, wanted, strict=True))
        return differ


def _seeded(seed):
    return torch.Generator(device=DEVICE).manual_seed(seed)


def main():
    boundaries, replays = map(int, sys.argv[1:])
    faulthandler.dump_traceback_later(150, exit=True)
    job = Job()
    choose, own, differ = random.Random(3), random.Random(job.rank), 0
    for turn in range(boundaries):
        if own.random() < 0.2:
            time.sleep(own.random() * 0.01)
        differ += job.differing(choose.choice(ROWS), 10_000 * (turn + 1), gemm=turn % 2 == 1)
    job.shared.mailbox.check()
    again = job.replays(replays)
    job.shared.mailbox.check()
    everybody = [None] * job.tp
    dist.all_gather_object(everybody, differ + again)
    if job.rank == 0:
        said = {
            "tp": job.tp,
            "boundaries": boundaries,
            "replays": replays,
            "layers": 2 * LAYERS,
            "differ": sum(everybody),
        }
        print(json.dumps(said), flush=True)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
