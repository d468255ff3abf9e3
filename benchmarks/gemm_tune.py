"""Find the launch shape of the small-M GEMM for each (N, K, rows) on a GPU, by trying what is plausible.

    python benchmarks/gemm_tune.py --fill CACHE_DIR [--only N,K]    compile all candidates; needs no GPU
    python benchmarks/gemm_tune.py --json FILE [--only N,K]         time them, in the cache folder of the environment
    python benchmarks/gemm_table.py FILE                            put the fastest into the package's table

Every candidate is checked against float64 on random data, then timed: a CUDA graph of calls that rotate over weights of
more than three times the L2, medians over replays, in turn with torch.mm of the same operands. The best dozen then race
once more, longer, because a minimum over many noisy medians favours the lucky.
"""

import argparse
import itertools
import json
import pathlib
import sys

import torch
from timing import capture, replay_times

from muse_jit.constants.gemm_shapes import BUCKETS
from muse_jit.constants.small_m_gemm import CLUSTERS, GemmShape, SmallMGemmConstants
from muse_jit.errors import ConstantsError

CASES = [(8192, 2048), (8192, 1024), (8192, 512), (2048, 4096), (1024, 4096), (512, 4096)]
"""o_proj at TP 4, 8 and 16, and the unpooler's column shards there."""
SMS, SM_BYTES = 132, 233472
"""Of an H200; candidates for another GPU would be others."""
FINALISTS = 12


def candidates(n, k, rows):
    """Shapes that give every SM something to do and have enough in flight."""
    found = {c: None for c in itertools.chain(with_wgmma(n, k, rows), with_mma(n, k, rows)) if c is not None}
    return list(found)


def possible(n, k, rows, *shape):
    """The constants, or None."""
    try:
        made = SmallMGemmConstants(n, k, rows, *shape, release_early=True)
        made.validate_for("sm_90a")
    except ConstantsError:
        return None
    return made


def with_wgmma(n, k, rows):
    """Stages: all that fit when a block has the SM for itself, or shares it with one or two."""
    clusters = [(c, 1) for c in CLUSTERS] + [(1, c) for c in (2, 4) if rows >= 32]
    for tile_n, slices, blocks, (cluster_k, cluster_n) in itertools.product((64, 128), (1, 2), (2, 4, 8), clusters):
        if not 60 <= n // tile_n * cluster_k <= 260 or (tile_n == 128 and slices == 2):
            continue
        one = (tile_n + rows) * 64 * blocks
        total = k // cluster_k // (32 * blocks)
        for sharing in (1, 2, 3) if rows <= 16 else (1, 2):
            stages = min(total, (SM_BYTES // sharing - 2048) // one) // slices * slices
            if stages * one >= 60_000 or stages == total:
                yield possible(
                    n, k, rows, tile_n, tile_n // 16 * slices, 1, blocks, stages, 1, cluster_k, cluster_n, "wgmma"
                )


def with_mma(n, k, rows):
    """For few rows, and for weights of few rows, of which wgmma takes 64 at a time."""
    if rows > 16 or n > 2048:
        return
    for tile_n, warps, m_tiles, (blocks, stages), cluster_k in itertools.product(
        (16, 32), (4, 8), (1, 2), ((4, 4), (8, 1), (8, 2)), (1, 2, 4)
    ):
        if 60 <= n // tile_n * cluster_k <= 300:
            yield possible(n, k, rows, tile_n, warps, m_tiles, blocks, stages, 8 if rows == 8 else 4, cluster_k)


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


def tune(n, k, rows):
    """The candidates of one case with their times, fastest first, and torch.mm's."""
    from muse_jit.ops.device import service_for

    service = service_for(torch.device("cuda", 0))
    found = candidates(n, k, rows)
    service.ensure(found)
    sets = max(2, -(-200_000_000 // (2 * n * k)))
    x, weights = operands(n, k, rows, sets)
    out = torch.empty(rows, n, dtype=torch.bfloat16, device="cuda")
    torch.mm(x, weights[0].t(), out=out)
    reference = error(out, x, weights[0])
    graphs = {"torch.mm": capture([lambda w=w: torch.mm(x, w.t(), out=out) for w in weights])}
    for number, constants in enumerate(found):
        kernel = service.get(constants)
        out.fill_(float("nan"))
        kernel(x, weights[0], out)
        wrong = error(out, x, weights[0])
        if not wrong <= max(2 * reference, 0.01):
            raise SystemExit(f"{constants} is wrong by {wrong}, torch.mm by {reference}")
        graphs[number] = capture([lambda w=w, kernel=kernel: kernel(x, w, out) for w in weights])
    times = replay_times(graphs, sets, replays=15, warm_up=3)
    ahead = sorted(range(len(found)), key=times.__getitem__)[:FINALISTS]
    times = replay_times({name: graphs[name] for name in ("torch.mm", *ahead)}, sets, replays=60, warm_up=5)
    ranked = sorted((times[number], number) for number in ahead)
    return {
        "n": n,
        "k": k,
        "rows": rows,
        "torch_mm_us": times["torch.mm"],
        "shapes": [
            {"us": us, **{name: getattr(found[number], name) for name in GemmShape._fields}} for us, number in ranked
        ],
        "tried": len(found),
        "ratio": ranked[0][0] / times["torch.mm"],
        "bytes_per_s": 2 * n * k / ranked[0][0] * 1e6,
    }


def fill(cases, cache_dir):
    """Compile every candidate into a cache folder."""
    from muse_jit.plan import Plan, Planned
    from muse_jit.settings import Settings
    from muse_jit.warmup import warm_up

    wanted = [c for (n, k), rows in itertools.product(cases, BUCKETS) for c in candidates(n, k, rows)]
    report = warm_up(
        Plan(tuple(Planned(c, "sm_90a") for c in wanted)), Settings.from_environ().with_options(cache_dir=cache_dir)
    )
    print({status: report.count(status) for status in ("hit", "compiled", "failed")})
    return 0 if report.complete else 1


def main():
    """Compile, or tune every case and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="N,K")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--fill", metavar="CACHE_DIR")
    what.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    cases = [tuple(map(int, arguments.only.split(",")))] if arguments.only else CASES
    if arguments.fill:
        return fill(cases, arguments.fill)
    found = []
    for (n, k), rows in itertools.product(cases, BUCKETS):
        case = tune(n, k, rows)
        found.append(case)
        best = tuple(case["shapes"][0].values())
        print(
            f"{n:5} {k:5} {rows:3}  mm {case['torch_mm_us']:6.2f}  ours {best[0]:6.2f}  {case['ratio']:.3f}  {best[1:]}"
        )
        sys.stdout.flush()
        result = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "cases": found}
        pathlib.Path(arguments.json).write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
