"""The norms against stock on one GPU: bits first, then times of both sides in one run.

    python benchmarks/norms.py --out benchmarks/results/h200/norms.json [--stock FOLDER] [--rows 1,2,4]

Times are medians of CUDA-graph replays of 40 launches that go round several input sets; the graphs of all contenders
take turns. The sets of one row count are at most 16 MiB, so that activations come from L2 for every contender, as they
do between the kernels of a decode step.
"Stock" is vLLM's Triton kernels as cubins (see benchmarks/stock.py). The kernels come from the cache of this process's
settings and are compiled when they are missing, where there is a compiler.
"""

import argparse
import dataclasses
import itertools
import json
import pathlib
import platform
import sys

import torch

sys.path[:0] = [
    str(pathlib.Path(__file__).resolve().parent),
    str(pathlib.Path(__file__).resolve().parents[1] / "tests"),
]

from stock import DEFAULT, Stock
from support.rows import rows_of, same_bits
from timing import capture, replay_times

from muse_jit.plan import Deployment, attention_boundary

H = 8192
BOUNDARY = attention_boundary(Deployment(), "sm_90a")
SETS_BYTES = 16 << 20
CALLS = 40
ROWS = (1, 2, 4, 8, 16, 32, 64)


class _StockNorm:
    """pre_qkv_proj_norm of layer 0, by its attributes."""

    hidden_size, variance_epsilon, variance_size_override = H, 1e-5, None
    has_weight, applies_weight_before_norm, fused_gain_center = True, False, 1.0

    def __init__(self):
        self.weight = (torch.randn(H, device="cuda") * 0.2).bfloat16()


def _sets(rows, bytes_per_row):
    """How many input sets to go round: two at least, eight at most."""
    return max(2, min(8, SETS_BYTES // (rows * bytes_per_row)))


def _turns(calls):
    """`CALLS` calls, going round the input sets."""
    return [calls[i % len(calls)] for i in range(CALLS)]


def layer_front(stock, rows):
    """Contenders for the first layer's front at one row count; bits are checked first."""
    from muse_jit.ops.layer_front import LayerFront

    norm = _StockNorm()
    front = LayerFront(norm, aux=False, order="triton-3.8")
    contenders = {}
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        ours, copy_and_norm, norm_alone = [], [], []
        for seed in range(_sets(rows, H * (dtype.itemsize + 6))):
            x = rows_of("normal", rows, H, dtype, seed)
            stream, expected = torch.empty(rows, H, device="cuda"), torch.empty(rows, H, device="cuda").bfloat16()
            out = torch.empty_like(expected)
            front.run(x, stream, out)
            stock.row_norm(x.float(), norm.weight, expected, 1e-5, 1.0)
            assert same_bits(out, expected) == same_bits(stream, x.float()) == 0

            def launch_ours(x=x, stream=stream, out=out):
                front.run(x, stream, out)

            def launch_norm(x=stream, out=expected):
                stock.row_norm(x, norm.weight, out, 1e-5, 1.0)

            def launch_both(x=x, stream=stream, launch_norm=launch_norm):
                stream.copy_(x)
                launch_norm()

            ours.append(launch_ours)
            copy_and_norm.append(launch_both)
            norm_alone.append(launch_norm)
        contenders[f"front {name}"] = _turns(ours)
        contenders[f"stock copy + norm {name}"] = _turns(copy_and_norm)
    contenders["stock norm alone"] = _turns(norm_alone)
    return contenders


def dual_norm(stock, rows, variants):
    """Contenders for the attention boundary's norms (D1) at one row count; bits are checked first."""
    from muse_jit.ops.dual_norm import DualNorm

    norms = {name: DualNorm(constants) for name, constants in variants.items()}
    alpha, beta = (torch.rand(H, device="cuda") * 0.9 + 0.05 for _ in range(2))
    weight = (torch.randn(H, device="cuda") * 0.2).bfloat16()
    contenders = {name: [] for name in (*norms, "stock dual norm")}
    for seed in range(_sets(rows, H * 12)):
        partial = rows_of("normal", rows, H, torch.bfloat16, seed)
        stream = rows_of("normal", rows, H, torch.float32, seed + 100)
        new, expected = torch.empty_like(stream), torch.empty_like(partial)

        def launch_stock(partial=partial, stream=stream, new=new, expected=expected):
            stock.dual_norm(BOUNDARY, partial, stream, new, None, alpha, beta, weight, expected)

        launch_stock()
        contenders["stock dual norm"].append(launch_stock)
        for name, norm in norms.items():
            mine, out = stream.clone(), torch.empty_like(partial)
            norm.run(partial, mine, None, alpha, beta, weight, out)
            assert same_bits(mine, new) == same_bits(out, expected) == 0, name

            def launch(norm=norm, partial=partial, mine=mine, out=out):
                norm.run(partial, mine, None, alpha, beta, weight, out)

            contenders[name].append(launch)
    return {name: _turns(calls) for name, calls in contenders.items()}


def measure(stock, rows, variants):
    """Median microseconds of every contender at one row count."""
    contenders = {**layer_front(stock, rows), **dual_norm(stock, rows, variants)}
    return replay_times({name: capture(calls) for name, calls in contenders.items()}, CALLS)


def spreads():
    """The boundary with every number of CTAs a row, with early release (as planned) and without."""
    for ctas, early in itertools.product((1, 2, 4, 8), (False, True)):
        name = f"dual norm, {ctas} CTAs a row{', early release' if early else ''}"
        yield name, dataclasses.replace(BOUNDARY, ctas_per_row=ctas, release_early=early)


def driver_version():
    """Version of the NVIDIA driver, as the kernel module says it; None where it does not."""
    try:
        words = pathlib.Path("/proc/driver/nvidia/version").read_text().split()
    except OSError:
        return None
    return next((word for word in words if word.count(".") >= 1 and word[0].isdigit()), None)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stock", type=pathlib.Path, default=DEFAULT)
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--spreads", action="store_true", help="measure every number of CTAs a row")
    options = parser.parse_args()
    stock = Stock(options.stock)
    variants = {"dual norm": BOUNDARY, **(dict(spreads()) if options.spreads else {})}
    table, again = (
        {rows: measure(stock, rows, variants) for rows in map(int, options.rows.split(","))} for _ in range(2)
    )
    document = {
        "device": torch.cuda.get_device_name(),
        "driver": driver_version(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "stock": f"vLLM 0.33.0's kernels, Triton {stock.triton}",
        "unit": "microseconds a launch, median of graph replays",
        "calls_per_graph": CALLS,
        "input_sets_bytes": SETS_BYTES,
        "runs": [table, again],
    }
    names = list(next(iter(table.values())))
    width = max(map(len, names))
    for run in (table, again):
        print("rows".ljust(width), *(f"{rows:>7}" for rows in run))
        for name in names:
            print(name.ljust(width), *(f"{run[rows][name]:7.2f}" for rows in run))
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
