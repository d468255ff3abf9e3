"""The plugin's replacement on a GPU, on a stub model over stock's kernels: bit for bit, captured, and careful."""

import logging

import pytest
import stock as stock_module
import torch
from support import stub_model
from support.rows import rows_of, same_bits
from support.stub_model import H, Worker, vllm_config

from muse_jit.ops import stock_layer
from muse_jit.ops.attention_boundary import AttentionBoundary
from muse_jit.ops.layer_front import LayerFront
from muse_jit.ops.o_projection import OProjection
from muse_jit.vllm_plugin import hooks, start
from muse_jit.vllm_plugin.start import context_of
from muse_jit.vllm_plugin.steps import Steps

pytestmark = pytest.mark.gpu

LAYERS = 4


@pytest.fixture(scope="module")
def stock():
    if not stock_module.available():
        pytest.skip("the stock cubins are not at .gpu/stock")
    return stock_module.Stock()


@pytest.fixture(params=[512, 1024, 2048])
def model(stock, request, monkeypatch):
    """By o_proj's input width on a rank: TP16, TP8 and TP4."""
    from stock_model import make_model

    monkeypatch.setattr(stub_model, "NORMS", None)
    return make_model(stock, LAYERS, request.param)[0]


@pytest.fixture
def order(monkeypatch):
    """Stock here is the cubins' Triton, whatever this machine carries."""

    def choose(name, boundary=None):
        monkeypatch.setattr(stock_layer, "stock_order", lambda: name)
        monkeypatch.setattr(stock_layer, "stock_boundary_order", lambda arch: boundary or name)
        monkeypatch.setattr(start, "unknown_stock", lambda arch, boundary: None)

    choose("triton-3.8")
    return choose


def _run(backbone, x, ids=False):
    backbone.keep_last = True
    positions = torch.arange(x.shape[0], device="cuda")
    out = backbone(positions % 128, positions, None) if ids else backbone(None, positions, None, inputs_embeds=x)
    return out, backbone.last


def _inputs(rows, dtype):
    return rows_of("normal", rows, H, dtype, rows)


def _equal(found, expected):
    return [same_bits(f, e) for f, e in zip(found, expected, strict=True)] == [0, 0]


def _loaded(model, caplog, **options):
    worker = Worker(model, vllm_config(**options), "cuda:0")
    with caplog.at_level(logging.INFO, "vllm.muse_jit"):
        hooks._before_load(worker)
        hooks._after_load(worker)
    return worker, [r.getMessage() for r in caplog.records if r.name == "vllm.muse_jit"]


@pytest.mark.parametrize("tp", [1, 8])
def test_outputs_and_stream_equal_stock_for_every_row_count(model, order, caplog, tp):
    backbone = model.model
    cases = [(rows, dtype) for rows in range(1, 66) for dtype in (torch.bfloat16, torch.float32)]
    expected = {case: _run(backbone, _inputs(*case)) for case in cases}
    by_ids = _run(backbone, _inputs(5, torch.float32), ids=True)
    worker, (line,) = _loaded(model, caplog, tp=tp)
    assert f"LayerFront and {LAYERS} attention boundaries replace stock in steps of up to 64 tokens" in line
    steps = worker.muse_jit.steps
    for case in cases:
        before = dict(steps.launches)
        assert _equal(_run(backbone, _inputs(*case)), expected[case]), case
        used = {name: count - before[name] for name, count in steps.launches.items()}
        small = case[0] <= 64
        assert used == {"front": int(small), "boundary": LAYERS * small, "o_proj": 0}, case
    assert _equal(_run(backbone, _inputs(5, torch.float32), ids=True), by_ids)
    steps.remove()


def test_a_captured_step_is_replayed_with_stocks_bits(model, order, caplog):
    backbone = model.model
    inputs = [_inputs(rows, torch.bfloat16) for rows in (8, 8)]
    inputs[1] = inputs[1] * 3
    expected = [_run(backbone, x) for x in inputs]
    worker, _ = _loaded(model, caplog)
    x = inputs[0].clone()
    _run(backbone, x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = _run(backbone, x)
    for given, wanted in zip(inputs * 2, expected * 2, strict=True):
        x.copy_(given)
        graph.replay()
        torch.cuda.synchronize()
        assert _equal(found, wanted)
    worker.muse_jit.steps.remove()


def test_another_order_is_found_out_and_stays_stock(model, order, caplog):
    """Kernels in the order of another Triton, and of FlashInfer: the comparison at the start refuses them."""
    order("triton-3.6", "flashinfer-0.7")
    worker, lines = _loaded(model, caplog)
    assert worker.muse_jit.steps is None
    assert [line.partition(": ")[2].partition(":")[0] for line in lines[:2]] == [
        "the first layer's norm stays stock",
        "the attention boundary stays stock",
    ]
    assert "differ from stock" in lines[0]
    assert "differ from stock" in lines[1]
    assert lines[2].endswith("nothing is replaced")
    assert "forward" not in vars(model.model)


def test_the_decode_builders_objects_in_a_captured_step(model, order):
    """OProjection, AttentionBoundary and LayerFront together, the all-reduce of one rank being the identity."""
    backbone, config = model.model, vllm_config(tp=16)
    x = _inputs(16, torch.bfloat16)
    expected = _run(backbone, x)
    ctx = context_of(Worker(model, config, "cuda:0"), backbone)
    projections = {layer: OProjection.build(ctx, layer) for layer in backbone.layers}
    boundaries = {layer: AttentionBoundary.build(ctx, layer, all_reduce=lambda p: p) for layer in backbone.layers}
    front = LayerFront.build(ctx, backbone.layers[0], 64)
    steps = Steps(backbone, front, max_rows=64, takes=lambda rows: torch.cuda.is_current_stream_capturing())
    steps.install(boundaries, projections)
    assert _equal(_run(backbone, x), expected)
    assert steps.launches == {"front": 0, "boundary": 0, "o_proj": 0}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = _run(backbone, x)
    assert steps.launches == {"front": 1, "boundary": LAYERS, "o_proj": LAYERS}
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        assert _equal(found, expected)
    steps.remove()


def test_o_proj_equals_stocks_for_every_row_count(model, order):
    layer = model.model.layers[0]
    projection = OProjection(layer.self_attn.o_proj.weight)
    for rows in range(1, 66):
        x = _inputs(rows, torch.bfloat16)[:, : projection.inputs].contiguous()
        out = torch.full((rows, H), float("nan"), dtype=torch.bfloat16, device="cuda")
        assert projection.run(x, out) is out
        assert same_bits(out, layer.self_attn.o_proj(x)[0]) == 0, rows


def test_the_boundary_allocates_nothing(model, order):
    layer = model.model.layers[0]
    ctx = context_of(Worker(model, vllm_config(tp=16), "cuda:0"), model.model)
    boundary = AttentionBoundary.build(ctx, layer, all_reduce=lambda partial: partial)
    partial, stream = _inputs(8, torch.bfloat16), _inputs(8, torch.float32)
    out = torch.empty_like(partial)
    boundary.run(partial, stream, out)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    boundary.run(partial, stream, out)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
