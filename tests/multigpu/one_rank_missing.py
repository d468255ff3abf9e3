"""A torchrun job for test_all_reduce.py: the last rank stays away once; the others say so, and all go on after a reset.

Prints, on each rank, one line that begins with its number.
"""

import pathlib
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests"), str(ROOT / "tests" / "gpu"), str(ROOT)]

import cases
import torch
from ranks import Rank
from support.rows import same_bits
from support.stock_sum import stock_sum

from muse_jit.errors import RankMissing
from muse_jit.ops.all_reduce_dual_norm import AllReduceDualNorm
from muse_jit.ops.dual_norm import DualNorm

H = 8192


def main():
    rank = Rank(120)
    shared = AllReduceDualNorm(
        rank.device_group, rank.cpu_group, device=rank.device, sum_order="mnnvl", timeout_s=cases.WATCHDOG_S
    )
    bound, alone = shared.bind(cases.BOUNDARY), DualNorm(cases.BOUNDARY, rank.device)
    gate = torch.full((H,), 0.5, device=rank.device)
    weight = torch.zeros(H, dtype=torch.bfloat16, device=rank.device)

    def boundary(norm, partial):
        stream, out = torch.ones(partial.shape, device=rank.device), torch.empty_like(partial)
        norm.run(partial, stream, None, gate, gate, weight, out)
        torch.cuda.synchronize()
        return stream, out

    def right(rows, seed):
        """Whether one boundary of all ranks gives the stock bits."""
        generators = [torch.Generator(device=rank.device).manual_seed(seed + n) for n in range(rank.tp)]
        partials = [torch.randn(rows, H, generator=g, device=rank.device).bfloat16() for g in generators]
        got, wanted = boundary(bound, partials[rank.number]), boundary(alone, stock_sum(partials, "mnnvl"))
        return sum(same_bits(a, b) for a, b in zip(got, wanted, strict=True)) == 0

    before = all([right(rows, rows) for rows in (1, 64, 5)])
    said, seconds = "", 0.0
    if rank.number != rank.tp - 1:
        began = time.monotonic()
        stream, out = boundary(bound, torch.ones(3, H, dtype=torch.bfloat16, device=rank.device))
        seconds = time.monotonic() - began
        try:
            shared.mailbox.check()
        except RankMissing as error:
            said = str(error) if bool(stream.isnan().all() and out.isnan().all()) else "outputs are not NaN"
    rank.gather(None)
    shared.mailbox.reset()
    after = all([right(rows, 100 + rows) for rows in (1, 64, 5)])
    print(f"{rank.number}|{before}|{after}|{seconds:.1f}|{said}", flush=True)
    rank.leave(0)


if __name__ == "__main__":
    main()
