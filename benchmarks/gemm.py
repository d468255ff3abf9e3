"""The small-M GEMM against torch.mm on one GPU, alone and behind a norm by dependent launch: errors, then times.

    python benchmarks/gemm.py --out benchmarks/results/h200/gemm.json [--rows 1,8] [--sizes 8192x1024] [--replays 60]
    python benchmarks/gemm.py --markdown benchmarks/results/h200/gemm.json      results as the README's table; no GPU

Everything in one run, by CUDA-graph replay, medians; the graphs of all contenders take turns.

- alone: launches that go round weights of at least 160 MB, three times the L2, so that each comes from memory;
- chain: the attention boundary's dual norm (launched dependently, as it is served) and then the GEMM, whose result is
  the next norm's partial sum, once around all weights; for o_proj's sizes. A norm is also timed alone.

A launch's bytes are its weight, x and out. Their share of the bandwidth is that of a device copy of the same run (bytes
read and written), and of a pure read (torch.sum). The kernels come from the cache of this process's settings.
"""

import argparse
import json
import pathlib
import platform
import sys

import torch

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests"), str(ROOT / "tests" / "gpu")]

from cases import GEMM_SIZES
from norms import driver_version
from support.gemm_operands import errors, operands
from timing import capture, replay_times

from muse_jit.constants.gemm_shapes import shape_for
from muse_jit.ops.unpooler import Unpooler
from muse_jit.plan import Deployment, attention_boundary

ROWS = (1, 2, 4, 8, 16, 32, 64)
H = 8192
ARCH = "sm_90a"
ROTATED_BYTES = 160_000_000
CALLS = 40
"""Launches of a graph, at least."""
COPIED_BYTES = 1 << 30


def bandwidth(replays):
    """Bytes a microsecond of a device copy, read and written by a kernel (a copy node of a graph is slower), and of a
    read."""
    source = torch.ones(COPIED_BYTES // 4, device="cuda")
    target, total = torch.empty_like(source), torch.empty((), device="cuda")
    graphs = {
        "copy": capture([lambda: torch.neg(source, out=target)]),
        "read": capture([lambda: torch.sum(source, dim=0, out=total)]),
    }
    times = replay_times(graphs, 1, replays=replays)
    return {"copy": 2 * COPIED_BYTES / times["copy"], "read": COPIED_BYTES / times["read"]}


class Size:
    """Weights of one size to go round, each with its Unpooler."""

    def __init__(self, n, k, rows):
        self.n, self.k = n, k
        sets = max(2, -(-ROTATED_BYTES // (2 * n * k)))
        self.weights = [operands(n, k, 1, seed=seed)[1] for seed in range(sets)]
        self.gemms = [Unpooler(weight, rows=rows) for weight in self.weights]
        self.rounds = -(-CALLS // sets)

    @property
    def calls(self):
        return self.rounds * len(self.weights)

    def contenders(self, x, out):
        """The calls of both sides, each as often as `calls` says."""
        ours = [lambda gemm=gemm: gemm.run(x, out) for gemm in self.gemms]
        stock = [lambda weight=weight: torch.mm(x, weight.t(), out=out) for weight in self.weights]
        return {"ours": ours * self.rounds, "torch.mm": stock * self.rounds}

    def check(self, x, out):
        """Mean and largest error of both against float64, for one weight; nothing is timed that is wrong."""
        found = {}
        for name, calls in self.contenders(x, out).items():
            out.fill_(float("nan"))
            calls[0]()
            error = errors(out, x, self.weights[0])
            found[name] = {"mean": error.mean().item(), "largest": error.max().item()}
        assert found["ours"]["mean"] <= 1.05 * found["torch.mm"]["mean"], found
        return found


def alone(size, rows, rates, replays):
    """Times of both, their ratio, and our share of the bandwidths."""
    x = operands(16, size.k, rows, seed=rows)[0]
    out = torch.empty(rows, size.n, dtype=torch.bfloat16, device="cuda")
    error = size.check(x, out)
    graphs = {name: capture(calls) for name, calls in size.contenders(x, out).items()}
    times = replay_times(graphs, size.calls, replays=replays)
    moved = 2 * (size.n * size.k + rows * (size.n + size.k))
    chosen = shape_for(size.n, size.k, rows, ARCH)
    return {
        **{name: round(us, 3) for name, us in times.items()},
        "ratio": round(times["ours"] / times["torch.mm"], 3),
        "bytes": moved,
        "share_of_copy": round(moved / times["ours"] / rates["copy"], 3),
        "share_of_read": round(moved / times["ours"] / rates["read"], 3),
        "tuned": chosen.tuned,
        "shape": chosen.shape._asdict(),
        "error": error,
    }


def chain(size, rows, replays):
    """Microseconds of a norm and a GEMM, for both GEMMs, and of a norm alone."""
    from muse_jit.ops.dual_norm import DualNorm

    norm = DualNorm(attention_boundary(Deployment(), ARCH))
    alpha, beta = (torch.rand(H, device="cuda") * 0.9 + 0.05 for _ in range(2))
    following = (torch.randn(H, device="cuda") * 0.2).bfloat16()
    stream = torch.randn(rows, H, device="cuda")
    x = operands(16, size.k, rows, seed=rows)[0]
    partial, normed = (torch.zeros(rows, H, dtype=torch.bfloat16, device="cuda") for _ in range(2))

    def run_norm():
        norm.run(partial, stream, None, alpha, beta, following, normed)

    def behind(calls):
        return [step for call in calls for step in (run_norm, call)]

    graphs = {name: capture(behind(calls)) for name, calls in size.contenders(x, partial).items()}
    graphs["norm alone"] = capture([run_norm] * size.calls)
    times = replay_times(graphs, size.calls, replays=replays)
    return {
        "norm and ours": round(times["ours"], 3),
        "norm and torch.mm": round(times["torch.mm"], 3),
        "norm alone": round(times["norm alone"], 3),
        "ratio": round(times["ours"] / times["torch.mm"], 3),
    }


def measure(n, k, all_rows, rates, replays):
    """One size: by row count, alone and, for o_proj's sizes, in the chain."""
    size = Size(n, k, all_rows)
    found = {"alone": {rows: alone(size, rows, rates, replays) for rows in all_rows}}
    if n == H:
        found["chain"] = {rows: chain(size, rows, replays) for rows in all_rows}
    return found


def show(name, found, all_rows):
    """A table of one size on the terminal."""
    print(f"{name}".ljust(18), *(f"{rows:>7}" for rows in all_rows))
    lines = [("ours", "alone", "ours"), ("torch.mm", "alone", "torch.mm"), ("ratio", "alone", "ratio")]
    lines += [("share of copy", "alone", "share_of_copy")]
    if "chain" in found:
        lines += [(key, "chain", key) for key in ("norm and ours", "norm and torch.mm", "norm alone")]
        lines += [("ratio in chain", "chain", "ratio")]
    for label, part, key in lines:
        print(label.ljust(18), *(f"{found[part][rows][key]:7.2f}" for rows in all_rows), flush=True)


def markdown(document):
    """The README's table of a result file: for each size ours, torch.mm, their ratio and the share of the bandwidth."""
    rows = list(next(iter(document["sizes"].values()))["alone"])
    lines = [f"| rows | {' | '.join(rows)} |", "|---" * (len(rows) + 1) + "|"]

    def line(label, part, text):
        lines.append(f"| {label} | {' | '.join(text(part[count]) for count in rows)} |")

    for name, found in document["sizes"].items():
        n, k = name.split("x")
        line(f"[{n}, {k}], ours / torch.mm", found["alone"], lambda v: f"{v['ours']:.2f} / {v['torch.mm']:.2f}")
        line("ratio, share of the copy", found["alone"], lambda v: f"{v['ratio']:.2f}, {v['share_of_copy']:.0%}")
        if "chain" in found:
            both = "norm and ours", "norm and torch.mm"
            line("behind the norm", found["chain"], lambda v, both=both: " / ".join(f"{v[b]:.2f}" for b in both))
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--markdown", type=pathlib.Path, metavar="RESULT")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--sizes", default=",".join(f"{n}x{k}" for n, k in GEMM_SIZES))
    parser.add_argument("--replays", type=int, default=60)
    options = parser.parse_args()
    if options.markdown:
        print(markdown(json.loads(options.markdown.read_text())))
        return
    all_rows = tuple(map(int, options.rows.split(",")))
    rates = bandwidth(options.replays)
    print({name: f"{rate / 1e6:.2f} TB/s" for name, rate in rates.items()}, flush=True)
    sizes = {}
    for name in options.sizes.split(","):
        sizes[name] = measure(*map(int, name.split("x")), all_rows, rates, options.replays)
        show(name, sizes[name], all_rows)
    document = {
        "device": torch.cuda.get_device_name(),
        "driver": driver_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "unit": "microseconds a launch (in the chain: of norm and GEMM), median of graph replays",
        "replays": options.replays,
        "rotated_bytes": ROTATED_BYTES,
        "bytes_per_us": {name: round(rate) for name, rate in rates.items()},
        "sizes": sizes,
    }
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
