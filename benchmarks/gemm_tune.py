"""Find the launch shape of the small-M GEMM for each (N, K, rows) on a GPU, by trying what is possible.

    python benchmarks/gemm_tune.py [--quick] [--only N,K] --json FILE

Compiles every candidate (into the cache folder of the environment, in parallel), checks it against float64 on random
data, and times it: a CUDA graph of calls that rotate over weights of more than twice the L2, medians over replays, in
turn with torch.mm of the same operands.
"""

import argparse
import itertools
import json
import pathlib
import sys

import torch
from timing import capture, replay_times

from muse_jit.constants.small_m_gemm import WARP, SmallMGemmConstants
from muse_jit.errors import ConstantsError
from muse_jit.ops.device import service_for

SHAPES = [(8192, 2048), (8192, 1024), (8192, 512)]
"""o_proj at TP 4, 8 and 16."""
BUCKETS = (8, 16, 32, 64)
REGISTERS = 65536


def candidates(n, k, rows, quick):
    """Every shape that is possible, fills the GPU once or twice, and fits the registers."""
    found = []
    for tile_n, warps, m_tiles, depth in itertools.product(
        (16, 32, 64, 128), (2, 4, 8, 16, 32), (1, 2, 4), (1, 2, 4, 8, 16)
    ):
        try:
            c = SmallMGemmConstants(n, k, rows, tile_n, warps, m_tiles, depth, release_early=True)
        except ConstantsError:
            continue
        blocks = n // tile_n
        n_tiles = rows // 8
        registers = m_tiles * 8 * depth + n_tiles * (m_tiles * 4 + 8) + 32
        per_sm = -(-blocks // 132)
        if not 96 <= blocks <= 1024 or registers > 250:
            continue
        if registers * warps * WARP * min(per_sm, 2) > REGISTERS * 1.15:
            continue
        if 2 * tile_n * k * min(per_sm, 4) < 2 * n * k // 132 * 0.4:
            continue
        in_flight = warps * m_tiles * 32 * depth * 32 * min(per_sm, 2)
        if in_flight < (32768 if quick else 24576) and depth < c.k_warp // 32:
            continue
        found.append(c)
    return found


def operands(n, k, rows, sets, seed=0):
    """x and rotating weights, BF16, random."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    x = torch.randn(rows, k, generator=generator, device="cuda").bfloat16()
    weights = [(torch.randn(n, k, generator=generator, device="cuda") * k**-0.5).bfloat16() for _ in range(sets)]
    return x, weights


def error(out, x, weight):
    """Largest error against float64, relative to the largest result."""
    exact = x.double() @ weight.double().t()
    return ((out.double() - exact).abs().max() / exact.abs().max()).item()


def tune(n, k, rows, quick):
    """The candidates of one case with their times, fastest first, and torch.mm's."""
    service = service_for(torch.device("cuda", 0))
    found = candidates(n, k, rows, quick)
    report = service.ensure(found)
    print(f"{n} {k} {rows}: {len(found)} shapes, {report.compiled} compiled, {report.failed} failed", file=sys.stderr)
    found = [c for c, r in zip(found, report.kernels, strict=True) if r.status != "failed"]
    sets = max(2, -(-160_000_000 // (2 * n * k)))
    x, weights = operands(n, k, rows, sets)
    out = torch.empty(rows, n, dtype=torch.bfloat16, device="cuda")
    torch.mm(x, weights[0].t(), out=out)
    reference = error(out, x, weights[0])
    graphs = {"torch.mm": capture([lambda w=w: torch.mm(x, w.t(), out=out) for w in weights])}
    rows_of = {}
    for number, c in enumerate(found):
        kernel = service.get(c)
        out.fill_(float("nan"))
        kernel(x, weights[0], out)
        wrong = error(out, x, weights[0])
        assert wrong <= max(2 * reference, 0.01), (c, wrong, reference)
        graphs[number] = capture([lambda w=w, kernel=kernel: kernel(x, w, out) for w in weights])
        rows_of[number] = wrong
    times = replay_times(graphs, sets, replays=15 if quick else 30, warm_up=3)
    ranked = sorted((times[number], number) for number in rows_of)
    names = ("tile_n", "warps", "m_tiles", "depth")
    return {
        "n": n,
        "k": k,
        "rows": rows,
        "torch_mm_us": times["torch.mm"],
        "shapes": [{"us": us, **{name: getattr(found[number], name) for name in names}} for us, number in ranked[:12]],
        "tried": len(found),
        "ratio": ranked[0][0] / times["torch.mm"],
        "bytes_per_s": 2 * n * k / ranked[0][0] * 1e6,
    }


def main():
    """Tune every case and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only")
    parser.add_argument("--json", required=True)
    arguments = parser.parse_args()
    shapes = [tuple(map(int, arguments.only.split(",")))] if arguments.only else SHAPES
    cases = []
    for (n, k), rows in itertools.product(shapes, BUCKETS):
        case = tune(n, k, rows, arguments.quick)
        cases.append(case)
        best = case["shapes"][0]
        print(
            f"{n:5} {k:5} {rows:3}  mm {case['torch_mm_us']:6.2f}  ours {best['us']:6.2f}  {case['ratio']:.2f}  {best}"
        )
        sys.stdout.flush()
        result = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "cases": cases}
        pathlib.Path(arguments.json).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
