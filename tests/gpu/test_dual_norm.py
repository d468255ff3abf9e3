"""The dual norm on a GPU: bit for bit what the stock kernel writes there, and what the runtime object promises."""

import pathlib
import sys

import numpy as np
import pytest
import torch
from oracle import dual
from support.rows import KINDS, rows_of, same_bits

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import cases
import stock as stock_module

pytestmark = pytest.mark.gpu

ROWS = (*range(1, 65), 65, 127, 256, 1000)
SOME_ROWS = (1, 3, 64, 65, 256)
FOLDERS = {"triton-3.8": stock_module.DEFAULT, "triton-3.6": stock_module.DEFAULT.with_name("stock36")}


@pytest.fixture(scope="module")
def stocks():
    """Stock kernels by order, for the Triton versions whose cubins are at hand."""
    found = {order: stock_module.Stock(folder) for order, folder in FOLDERS.items() if stock_module.available(folder)}
    if "triton-3.8" not in found:
        pytest.skip("the stock cubins are not at .gpu/stock")
    for order, stock in found.items():
        assert stock.triton.startswith(order.removeprefix("triton-"))
    return found


def _norm(constants):
    from muse_jit.ops.dual_norm import DualNorm

    return DualNorm(constants)


def _vector(width, seed, low, high, dtype):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return (torch.rand(width, generator=generator, device="cuda") * (high - low) + low).to(dtype)


def _parameters(c):
    """post_weight, alpha, beta, next_weight, as a trained model has them: alpha in [0.03, 1], beta in (0, 1)."""
    gates = c.hidden if c.gate == "channel" else 1
    return (
        _vector(c.hidden, 1, -0.5, 0.5, torch.bfloat16) if c.post_weight != "none" else None,
        _vector(gates, 2, 0.0316, 1.0, torch.float32) if c.alpha_tensor else c.alpha,
        _vector(gates, 3, 0.0, 1.0, torch.float32),
        _vector(c.hidden, 4, -0.5, 0.5, torch.bfloat16) if c.next_has_weight else None,
    )


def _inputs(c, kind, rows, seed):
    """The partial sum and the stream, of one kind each; the stream's kind is the next one."""
    other = KINDS[(KINDS.index(kind) + seed) % len(KINDS)]
    return (
        rows_of(kind, rows, c.hidden, torch.bfloat16, seed),
        rows_of(other, rows, c.hidden, torch.float32, seed + 500),
    )


def _run(norm, partial, stream, parameters):
    """New stream and output; the output's memory is poisoned before."""
    stream = stream.clone()
    out = torch.full(stream.shape, float("nan"), dtype=norm.out_dtype, device="cuda")
    post_weight, alpha, beta, next_weight = parameters
    norm.run(partial, stream, post_weight, alpha, beta, next_weight, out)
    return stream, out


def _expected(stock, c, partial, stream, parameters):
    new = torch.full_like(stream, float("nan"))
    out = torch.full(stream.shape, float("nan"), dtype=torch.bfloat16 if c.out_dtype == "bf16" else torch.float32,
                     device="cuda")  # fmt: skip
    stock.dual_norm(c, partial, stream, new, *parameters, out)
    return new, out


def _compare(stock, c, kinds, all_rows):
    norm, parameters = _norm(c), _parameters(c)
    for kind in kinds:
        for seed, rows in enumerate(all_rows):
            inputs = _inputs(c, kind, rows, seed)
            got, expected = _run(norm, *inputs, parameters), _expected(stock, c, *inputs, parameters)
            assert [same_bits(g, e) for g, e in zip(got, expected, strict=True)] == [0, 0], (kind, rows)


@pytest.mark.parametrize("name", cases.BOUNDARIES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_boundaries_equal_stock(stocks, name, kind):
    _compare(stocks["triton-3.8"], cases.BOUNDARIES[name], [kind], ROWS)


@pytest.mark.parametrize("constants", list(cases.boundary_sets()), ids=str)
def test_spreading_a_row_and_pdl_change_no_bit(stocks, constants):
    _compare(stocks["triton-3.8"], constants, KINDS, SOME_ROWS)


@pytest.mark.parametrize("order", FOLDERS)
@pytest.mark.parametrize("index", range(72))
def test_every_combination_of_flags_equals_stock(stocks, order, index):
    if order not in stocks:
        pytest.skip("the stock cubins of Triton 3.6 are not at .gpu/stock36")
    _compare(stocks[order], list(cases.dual_norm_sets(order))[index], KINDS, SOME_ROWS)


@pytest.mark.parametrize("constants", list(cases.emulated_boundaries()), ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_bits_equal_the_emulated_order(constants, kind):
    """FlashInfer's order, which is stock on another architecture, and other widths: numpy, with this GPU's rsqrt."""

    def rsqrt(a):
        return torch.rsqrt(torch.from_numpy(np.ascontiguousarray(a)).cuda()).cpu().numpy()

    def array(value):
        return value.float().cpu().numpy() if isinstance(value, torch.Tensor) else value

    norm, parameters = _norm(constants), _parameters(constants)
    partial, stream = _inputs(constants, kind, 6, 11)
    got = _run(norm, partial, stream, parameters)
    expected = dual.dual_norm(array(partial), array(stream), *map(array, parameters), constants, "sm_90a", rsqrt)
    assert [same_bits(g.float().cpu(), torch.from_numpy(e)) for g, e in zip(got, expected, strict=True)] == [0, 0]


@pytest.fixture(scope="module")
def boundary():
    return _norm(cases.BOUNDARIES["D2"])


def _operands(rows=4):
    c = cases.BOUNDARIES["D2"]
    post_weight, alpha, beta, next_weight = _parameters(c)
    return {
        "partial": torch.randn(rows, 8192, device="cuda").bfloat16(),
        "stream": torch.randn(rows, 8192, device="cuda"),
        "post_weight": post_weight,
        "alpha": alpha,
        "beta": beta,
        "next_weight": next_weight,
        "out": torch.empty(rows, 8192, device="cuda", dtype=torch.bfloat16),
    }


def _shifted(tensor, elements):
    """The same shape and dtype, contiguous, its first byte `elements` off an aligned address."""
    memory = torch.empty(tensor.numel() + elements, dtype=tensor.dtype, device="cuda")
    return memory[elements:].view(tensor.shape)


@pytest.mark.parametrize("operand", ["partial", "stream", "post_weight", "alpha", "beta", "next_weight", "out"])
@pytest.mark.parametrize("fault", ["dtype", "shape", "strides", "alignment", "device"])
def test_wrong_operands_are_named(boundary, operand, fault):
    operands = _operands()
    good = operands[operand]
    changes = {
        "dtype": lambda: good.half(),
        "shape": lambda: good[..., :4096].contiguous(),
        "strides": lambda: torch.stack([good, good], dim=-1)[..., 0],
        "alignment": lambda: _shifted(good, 1),
        "device": lambda: good.cpu(),
    }
    operands[operand] = changes[fault]()
    with pytest.raises(ValueError, match=rf"^{operand} must"):
        boundary.run(**operands)


@pytest.mark.parametrize(("operand", "value"), [("post_weight", None), ("next_weight", None), ("alpha", 1.0)])
def test_missing_operands_are_named(boundary, operand, value):
    with pytest.raises(ValueError, match=rf"^{operand} must be"):
        boundary.run(**{**_operands(), operand: value})


def test_zero_rows_are_a_no_op(boundary):
    boundary.run(**_operands(0))
    torch.cuda.synchronize()


def test_it_is_captured_replayed_and_allocates_nothing(boundary, stocks):
    operands = _operands(8)
    stream = operands["stream"].clone()
    boundary.run(**operands)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    boundary.run(**operands)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(4):
            boundary.run(**operands)
    operands["stream"].copy_(stream)
    expected = stream
    parameters = [operands[n] for n in ("post_weight", "alpha", "beta", "next_weight")]
    for _ in range(50):
        graph.replay()
        for _ in range(4):
            expected, out = _expected(
                stocks["triton-3.8"], cases.BOUNDARIES["D2"], operands["partial"], expected, parameters
            )
        torch.cuda.synchronize()
        assert same_bits(operands["stream"], expected) == same_bits(operands["out"], out) == 0


def test_the_standalone_norm_is_made_once():
    from muse_jit.ops.dual_norm import standalone_dual_norm

    assert standalone_dual_norm(cases.BOUNDARIES["D1"]) is standalone_dual_norm(cases.BOUNDARIES["D1"])
