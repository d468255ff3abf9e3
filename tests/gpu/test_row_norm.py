"""The row norm on a GPU: bit for bit what the stock kernel writes there, and what runtime objects promise."""

import dataclasses
import pathlib
import sys

import pytest
import torch
from support.rows import KINDS, rows_of, same_bits

from muse_jit.errors import CompileDuringCapture

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import cases
import stock as stock_module

pytestmark = pytest.mark.gpu

ROWS = (*range(1, 65), 65, 127, 256, 1000)
H = 8192


@pytest.fixture(scope="module")
def stock():
    if not stock_module.available():
        pytest.skip("the stock cubins are not at .gpu/stock")
    return stock_module.Stock()


def _weight(seed=3, dtype=torch.bfloat16, width=H):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    weight = torch.randn(width, generator=generator, device="cuda") * 0.2
    weight[3] = -0.0
    return weight.to(dtype)


def _norm(constants):
    from muse_jit.ops.row_norm import RowNorm

    return RowNorm(constants, _weight(width=constants.hidden) if constants.has_weight else None)


def _run(norm, x):
    """The outputs of one launch into poisoned memory: out, stream, aux."""
    rows, c = x.shape[0], norm.constants
    out = torch.full((rows, c.hidden), float("nan"), dtype=norm.out_dtype, device="cuda")
    copies = [
        torch.full((rows, c.hidden), float("nan"), dtype=torch.float32, device="cuda") if wanted else None
        for wanted in (c.stream, c.aux)
    ]
    norm.launch(x, out, rows, *copies)
    return out, *copies


def _expected(stock, c, x):
    dtype = torch.bfloat16 if c.out_dtype == "bf16" else torch.float32
    out = torch.full((x.shape[0], c.hidden), float("nan"), dtype=dtype, device="cuda")
    stock.row_norm(x, _weight() if c.has_weight else None, out, c.eps, c.gain_center, before=c.weight_before_norm)
    return out


def _name(c):
    place = "before" if c.weight_before_norm else "after" if c.has_weight else "none"
    return f"{'fp32' if c.x_fp32 else 'bf16'}-{c.out_dtype}-{place}-{'pdl' if c.enable_pdl else 'plain'}"


@pytest.mark.parametrize("constants", list(cases.row_norm_sets()), ids=_name)
@pytest.mark.parametrize("kind", KINDS)
def test_bits_equal_stock(stock, constants, kind):
    norm = _norm(constants)
    for seed, rows in enumerate(ROWS):
        x = rows_of(kind, rows, H, norm.x_dtype, seed)
        assert same_bits(_run(norm, x)[0], _expected(stock, constants, x)) == 0, rows


@pytest.mark.parametrize("x_fp32", [False, True])
@pytest.mark.parametrize("aux", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_layer_front_equals_copy_and_stock_norm(stock, x_fp32, aux, kind):
    constants = dataclasses.replace(cases.FRONT, x_fp32=x_fp32, aux=aux)
    norm = _norm(constants)
    for seed, rows in enumerate(ROWS):
        x = rows_of(kind, rows, H, norm.x_dtype, 1000 + seed)
        out, stream, *rest = _run(norm, x)
        assert same_bits(out, _expected(stock, constants, x.float())) == 0, rows
        for copy in (stream, *[r for r in rest if r is not None]):
            assert same_bits(copy, x.float()) == 0


@pytest.mark.parametrize("constants", [c for c in cases.front_sets() if c.order == "triton-3.6" and not c.aux]
                         + list(cases.other_widths()), ids=str)  # fmt: skip
@pytest.mark.parametrize("kind", KINDS)
def test_bits_equal_the_emulated_order(constants, kind):
    """For the other order and other widths, whose stock cubins are not at hand: numpy, with this machine's rsqrt."""
    import numpy as np
    from oracle import norms

    def rsqrt(a):
        return torch.rsqrt(torch.from_numpy(np.ascontiguousarray(a)).cuda()).cpu().numpy()

    norm = _norm(constants)
    x = rows_of(kind, 12, constants.hidden, norm.x_dtype, 5)
    out, stream, _ = _run(norm, x)
    expected, expected_stream, _ = norms.row_norm(
        x.float().cpu().numpy(), _weight(width=constants.hidden).float().cpu().numpy(), constants, "sm_90a", rsqrt
    )
    assert same_bits(out.float().cpu(), torch.from_numpy(expected)) == 0
    assert same_bits(stream.cpu(), torch.from_numpy(expected_stream)) == 0


class _StockNorm:
    """A norm with the attributes of the stock class, as layer 0 has it."""

    hidden_size, variance_epsilon, variance_size_override = H, 1e-5, None
    has_weight, applies_weight_before_norm, fused_gain_center = True, False, 1.0

    def __init__(self):
        self.weight = _weight()


@pytest.fixture(scope="module")
def front():
    from muse_jit.ops.layer_front import LayerFront

    return LayerFront(_StockNorm(), aux=False, order="triton-3.8")


def _operands(rows=4, dtype=torch.bfloat16):
    return {
        "x": torch.randn(rows, H, device="cuda").to(dtype),
        "stream": torch.empty(rows, H, device="cuda"),
        "out": torch.empty(rows, H, device="cuda", dtype=torch.bfloat16),
    }


WRONG = {
    "x dtype": ("x", lambda t: t.half()),
    "stream dtype": ("stream", lambda t: t.bfloat16()),
    "out dtype": ("out", lambda t: t.float()),
    "out rows": ("out", lambda t: t[:3]),
    "stream width": ("stream", lambda t: t[:, :4096].contiguous()),
    "x not contiguous": ("x", lambda t: t.t().contiguous().t()),
    "x misaligned": ("x", lambda t: torch.empty(4 * H + 1, device="cuda", dtype=t.dtype)[1:].view(4, H)),
    "stream misaligned": ("stream", lambda t: torch.empty(4 * H + 4, device="cuda")[4:].view(4, H)),
    "x device": ("x", lambda t: t.cpu()),
    "out device": ("out", lambda t: t.cpu()),
    "x dimensions": ("x", lambda t: t[None]),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_operands_are_named(front, name):
    operand, change = WRONG[name]
    operands = _operands()
    operands[operand] = change(operands[operand])
    with pytest.raises(ValueError, match=rf"^{operand if name != 'x dimensions' else 'x'} must"):
        front.run(**operands)


def test_an_aux_that_was_not_built_is_refused(front):
    operands = _operands()
    with pytest.raises(ValueError, match=r"^aux must be None"):
        front.run(**operands, aux=torch.empty_like(operands["stream"]))


def test_zero_rows_are_a_no_op(front):
    front.run(**_operands(0))
    torch.cuda.synchronize()


def test_it_is_captured_replayed_and_allocates_nothing(front, stock):
    operands = _operands(8)
    front.run(**operands)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    front.run(**operands)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            front.run(**operands)
    for seed in range(20):
        x = rows_of("normal", 8, H, torch.bfloat16, seed)
        operands["x"].copy_(x)
        operands["out"].fill_(float("nan"))
        operands["stream"].fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert same_bits(operands["out"], _expected(stock, cases.FRONT, x.float())) == 0
        assert same_bits(operands["stream"], x.float()) == 0


def test_making_one_during_a_capture_is_refused_by_name(front):
    from muse_jit.ops.layer_front import LayerFront

    graph = torch.cuda.CUDAGraph()
    caught = None
    operands, norm = _operands(), _StockNorm()
    with torch.cuda.graph(graph):
        front.run(**operands)
        try:
            LayerFront(norm, aux=False, order="triton-3.8")
        except CompileDuringCapture as error:
            caught = error
    assert caught is not None
    assert "LayerFront is being made during a CUDA graph capture" in str(caught)


def test_a_side_stream_is_honoured(front, stock):
    operands = _operands(64)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(2_000_000)
        front.run(**operands)
    stream.synchronize()
    assert same_bits(operands["out"], _expected(stock, cases.FRONT, operands["x"].float())) == 0


def test_wrong_weights_are_refused():
    from muse_jit.ops.row_norm import RowNorm

    for weight, word in ((None, "given"), (_weight(dtype=torch.float32), "bfloat16"), (_weight()[:4096], "shape")):
        with pytest.raises(ValueError, match=rf"^weight must.*{word}"):
            RowNorm(cases.FRONT, weight)


def test_warm_up_and_build_from_a_layer():
    import types

    from muse_jit.ops.layer_front import LayerFront

    layer = types.SimpleNamespace(layer_idx=0, self_attn=types.SimpleNamespace(pre_qkv_proj_norm=_StockNorm()))
    ctx = types.SimpleNamespace(aux_layers=(0, 5), device=torch.device("cuda", 0))
    assert LayerFront.build(ctx, layer, 16).aux is True
