"""Attention boundaries of a whole model on one GPU: stock's calls against the runtime objects. Bits first, then times.

    python benchmarks/boundary.py --out benchmarks/results/h200/boundary.json [--layers 62] [--rows 1,2,4]

Two comparisons, both sides in one run, by CUDA-graph replay, everything captured with all layers:

- boundaries: o_proj (cuBLAS) and the attention boundary of each layer, chained by the stream; on one GPU there is no
  all-reduce in between, for neither side;
- model: the stub model's forward (tests/support/stub_model.py) as it is, and with the plugin's replacement installed
  as at vLLM's start (LayerFront, the attention boundaries; stock's FFN boundaries on both sides).

K is o_proj's input width on a rank: 512, 1024 and 2048 are TP16, TP8 and TP4. Stock's norms are vLLM's Triton kernels
as cubins (benchmarks/stock.py). The kernels come from the cache of this process's settings.
"""

import argparse
import json
import pathlib
import platform
import sys

import torch

sys.path[:0] = [
    str(pathlib.Path(__file__).resolve().parent),
    str(pathlib.Path(__file__).resolve().parents[1] / "tests"),
]

from norms import driver_version
from stock import DEFAULT, Stock
from stock_model import make_model
from support import stub_model
from support.rows import rows_of, same_bits
from support.stub_model import H, Worker, vllm_config
from timing import capture, replay_times

from muse_jit.ops import stock_layer
from muse_jit.ops.attention_boundary import AttentionBoundary
from muse_jit.ops.o_projection import OProjection
from muse_jit.vllm_plugin import start

ROWS = (1, 2, 4, 8, 16, 32, 64)
WIDTHS = (512, 1024, 2048)
BIT_ROWS = range(1, 65)


class Boundaries:
    """Every layer's o_proj and boundary, chained: stock's calls and ours on the same weights."""

    def __init__(self, model):
        self.backbone = model.model
        ctx = start.context_of(Worker(model, vllm_config(tp=16), "cuda:0"), self.backbone)
        self.ours = [
            (OProjection.build(ctx, layer), AttentionBoundary.build(ctx, layer, all_reduce=lambda partial: partial))
            for layer in self.backbone.layers
        ]

    def run_stock(self, x, stream):
        """Outputs of every layer and the last stream."""
        outs = []
        for layer in self.backbone.layers:
            partial, _ = layer.self_attn.o_proj(x)
            boundary = stub_model.MuseSpark1xResidualStream(stream, partial, layer.post_attn_norm, layer.add_attn)
            out, stream = stub_model.norm_residual_then_norm(boundary, layer.pre_ffn_norm, out_dtype=torch.bfloat16)
            outs.append(out)
        return outs, stream

    def run_ours(self, x, stream, scratch, outs):
        """The same in place: `scratch` for the partial sums, one out per layer."""
        for (projection, boundary), out in zip(self.ours, outs, strict=True):
            projection.run(x, scratch)
            boundary.run(scratch, stream, out)


def operands(rows, width, layers, seed):
    x = rows_of("normal", rows, H, torch.bfloat16, seed)[:, :width].contiguous()
    stream = rows_of("normal", rows, H, torch.float32, seed + 1000)
    scratch = torch.empty(rows, H, dtype=torch.bfloat16, device="cuda")
    return x, stream, scratch, [torch.empty_like(scratch) for _ in range(layers)]


def boundary_bits(boundaries, width):
    """Elements that differ, over all row counts and layers: outputs, stream."""
    differ = {"out": 0, "stream": 0}
    for rows in BIT_ROWS:
        x, stream, scratch, outs = operands(rows, width, len(boundaries.ours), rows)
        expected, expected_stream = boundaries.run_stock(x, stream)
        boundaries.run_ours(x, stream, scratch, outs)
        differ["out"] += sum(same_bits(a, b) for a, b in zip(outs, expected, strict=True))
        differ["stream"] += same_bits(stream, expected_stream)
    return differ


def boundary_graphs(boundaries, width, rows):
    x, stream, scratch, outs = operands(rows, width, len(boundaries.ours), 1)
    return {
        "stock": capture([lambda: boundaries.run_stock(x, stream)]),
        "ours": capture([lambda: boundaries.run_ours(x, stream, scratch, outs)]),
    }


def forward(backbone, x, positions):
    return backbone(None, positions, None, inputs_embeds=x)


def model_inputs(rows, dtype, seed=3):
    return rows_of("normal", rows, H, dtype, seed), torch.arange(rows, device="cuda")


def model_bits(model, width):
    """Elements that differ of the whole model, stock against the installed replacement: outputs, last stream."""
    backbone, differ = model.model, {"out": 0, "stream": 0}
    backbone.keep_last = True
    cases = [(rows, dtype) for rows in BIT_ROWS for dtype in (torch.bfloat16, torch.float32)]
    expected = [(forward(backbone, *model_inputs(*case)), backbone.last) for case in cases]
    started = install(model)
    for case, (out, stream) in zip(cases, expected, strict=True):
        differ["out"] += same_bits(forward(backbone, *model_inputs(*case)), out)
        differ["stream"] += same_bits(backbone.last, stream)
    backbone.keep_last = False
    used = dict(started.steps.launches)
    started.steps.remove()
    return {**differ, "launches": used, "line": started.used}


def install(model):
    """What the plugin does once the weights are loaded."""
    worker = Worker(model, vllm_config(tp=1), "cuda:0")
    start.after_load(worker)
    if worker.muse_jit.steps is None:
        sys.exit("the plugin replaced nothing; its warnings say why")
    return worker.muse_jit


def model_graphs(model, rows):
    backbone = model.model
    x, positions = model_inputs(rows, torch.bfloat16)
    graphs = {"stock": capture([lambda: forward(backbone, x, positions)])}
    started = install(model)
    graphs["ours"] = capture([lambda: forward(backbone, x, positions)])
    started.steps.remove()
    return graphs


def as_stock_here():
    """The order of the cubins, whatever Triton this machine carries."""
    stock_layer.stock_order = lambda: "triton-3.8"
    stock_layer.stock_boundary_order = lambda arch: "triton-3.8"
    start.unknown_stock = lambda arch, boundary: None


def measure(graphs, layers, replays):
    return {name: round(time, 4) for name, time in replay_times(graphs, layers, replays=replays).items()}


def one_width(stock, width, options):
    """Bits and times for one o_proj width; microseconds a layer."""
    model, real = make_model(stock, options.layers, width)
    boundaries = Boundaries(model)
    document = {"real_classes": real, "boundary_bits": boundary_bits(boundaries, width)}
    small, _ = make_model(stock, 4, width)
    document["model_bits"] = model_bits(small, width)
    print(f"K={width}", document, flush=True)
    times = {}
    for rows in options.rows:
        times[rows] = {
            "boundary": measure(boundary_graphs(boundaries, width, rows), options.layers, options.replays),
            "model": measure(model_graphs(model, rows), options.layers, options.replays),
        }
        print(f"K={width} rows={rows}", times[rows], flush=True)
    return {**document, "microseconds_a_layer": times}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stock", type=pathlib.Path, default=DEFAULT)
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--layers", type=int, default=62)
    parser.add_argument("--widths", default=",".join(map(str, WIDTHS)))
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--replays", type=int, default=60)
    options = parser.parse_args()
    options.rows = [int(rows) for rows in options.rows.split(",")]
    as_stock_here()
    stock = Stock(options.stock)
    with torch.no_grad():
        widths = {int(width): one_width(stock, int(width), options) for width in options.widths.split(",")}
    document = {
        "device": torch.cuda.get_device_name(),
        "driver": driver_version(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "stock": f"vLLM 0.33.0's kernels, Triton {stock.triton}; o_proj by cuBLAS on both sides",
        "unit": "microseconds a layer, median of graph replays of all layers",
        "layers": options.layers,
        "bit_rows": [BIT_ROWS[0], BIT_ROWS[-1]],
        "widths": widths,
    }
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(document, indent=1) + "\n")
    parts = [document[part] for document in widths.values() for part in ("boundary_bits", "model_bits")]
    wrong = any(part["out"] or part["stream"] for part in parts)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
