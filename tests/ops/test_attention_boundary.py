"""The attention boundary and o_proj from a stock layer: constants, refusals, what is built at which TP."""

import types

import pytest
import torch
from support.stub_model import H, Model, Norm, vllm_config

from muse_jit.constants.dual_norm import DualNormConstants
from muse_jit.constants.gemm_shapes import OPROJ
from muse_jit.errors import ConstantsError
from muse_jit.ops import attention_boundary, o_projection
from muse_jit.ops.attention_boundary import AttentionBoundary, fused_all_reduce, producer_mailbox
from muse_jit.ops.context import BuildContext
from muse_jit.ops.o_projection import OProjection
from muse_jit.ops.stock_layer import boundary_constants
from muse_jit.plan import Deployment
from muse_jit.plan import attention_boundary as planned_boundary

NARROW = Norm(torch.ones(4096).bfloat16(), width=4096)


@pytest.fixture
def backbone():
    return Model(layers=2).model


@pytest.fixture
def duals(monkeypatch):
    """Constants of the standalone dual norms made; each is a recorder."""
    made = []

    def standalone(constants):
        made.append(constants)
        return types.SimpleNamespace(constants=constants, run=lambda *operands: made.append(operands))

    monkeypatch.setattr(attention_boundary, "standalone_dual_norm", standalone)
    return made


def _context(backbone, tp=16, **changes):
    return BuildContext(tp, None, torch.device("cpu"), backbone, **changes)


def _group(tp):
    return types.SimpleNamespace(device_group="device", cpu_group="cpu", world_size=tp)


class _FakeFused:
    """An AllReduceDualNorm without process groups."""

    made = 0

    def __init__(self, device_group, cpu_group, *, device, sum_order):
        _FakeFused.made += 1
        self.made_with = (device_group, cpu_group, device, sum_order)
        self.mailbox = object()

    def bind(self, constants, *, published):
        return types.SimpleNamespace(constants=constants, published=published)


class _FakeGemm:
    """An Unpooler without kernels."""

    def __init__(self, weight, mailbox, *, shape, rows):
        self.made_with = (weight, mailbox, shape, tuple(rows))

    def run(self, x, out):
        return out.fill_(7.0)


@pytest.fixture
def fakes(monkeypatch):
    """In the place of what needs a GPU."""
    monkeypatch.setattr(attention_boundary, "AllReduceDualNorm", _FakeFused)
    monkeypatch.setattr(o_projection, "Unpooler", _FakeGemm)


def test_the_target_boundary_is_the_planned_one(backbone):
    layer = backbone.layers[0]
    read = boundary_constants(layer.post_attn_norm, layer.add_attn, layer.pre_ffn_norm, order="triton-3.8")
    assert read == planned_boundary(Deployment(), "sm_90a")


def test_the_other_boundaries_are_read_too(backbone):
    layer, final = backbone.layers[0], backbone.norm
    options = {"order": "triton-3.8", "enable_pdl": False}
    ffn = boundary_constants(layer.post_ffn_norm, layer.add_ffn, backbone.layers[1].self_attn.pre_qkv_proj_norm,
                             **options)  # fmt: skip
    assert ffn == DualNormConstants(8192, 1e-8, "before", 1.0, next_eps=1e-5, next_gain_center=1.0, enable_pdl=False)
    last = boundary_constants(layer.post_ffn_norm, layer.add_ffn, final, **options)
    assert last == DualNormConstants(8192, 1e-8, "before", 1.0, next_eps=1e-5, enable_pdl=False)


def test_gates_of_one_element_and_a_number(backbone):
    layer = backbone.layers[0]
    connection = types.SimpleNamespace(alpha=0.75, beta=torch.ones(1))
    read = boundary_constants(layer.post_attn_norm, connection, layer.pre_ffn_norm, order="triton-3.8")
    assert (read.gate, read.alpha_tensor, read.alpha) == ("scalar", False, 0.75)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: setattr(x.post_attn_norm, "variance_size_override", 64), "full hidden size, not 64"),
        (lambda x: setattr(x.pre_ffn_norm, "variance_size_override", 64), "full hidden size, not 64"),
        (lambda x: setattr(x, "pre_ffn_norm", NARROW), "8192 columns and .* 4096"),
        (lambda x: setattr(x.pre_ffn_norm, "weight", torch.nn.Parameter(torch.ones(H))), "BF16 weights, not fp32"),
        (lambda x: delattr(x.add_attn, "beta"), "no gates alpha and beta"),
        (lambda x: setattr(x.add_attn, "beta", torch.ones(2)), "1 or 8192 elements both, beta has 2"),
        (lambda x: setattr(x.add_attn, "alpha", torch.ones(1)), "1 or 8192 elements both"),
        (lambda x: setattr(x.add_attn, "alpha", None), "no gates alpha and beta"),
        (lambda x: setattr(x, "residual_dtype", torch.bfloat16), "must be torch.float32, not torch.bfloat16"),
    ],
)  # fmt: skip
def test_wrong_layers_are_refused(backbone, duals, change, message):
    change(backbone.layers[0])
    with pytest.raises(ValueError, match=message):
        AttentionBoundary.build(_context(backbone), backbone.layers[0], all_reduce=lambda x: x)
    assert duals == []


def test_another_hidden_size_is_refused(backbone, duals):
    layer = backbone.layers[0]
    layer.post_attn_norm, layer.pre_ffn_norm = (
        Norm(None, 1e-8, width=4096),
        Norm(torch.ones(4096).bfloat16(), width=4096),
    )
    layer.add_attn.alpha, layer.add_attn.beta = torch.ones(4096), torch.ones(4096)
    with pytest.raises(ValueError, match="needs hidden size 8192, not 4096"):
        AttentionBoundary.build(_context(backbone), layer, all_reduce=lambda x: x)


def test_a_draft_models_layer_is_refused(backbone, duals):
    draft = Model(layers=1).model
    with pytest.raises(ValueError, match="not one of the target model's"):
        AttentionBoundary.build(_context(backbone), draft.layers[0], all_reduce=lambda x: x)
    with pytest.raises(ValueError, match="needs a decoder layer"):
        AttentionBoundary.build(_context(backbone), None, all_reduce=lambda x: x)


def test_epsilon_that_cannot_be(backbone, duals):
    backbone.layers[0].pre_ffn_norm.variance_epsilon = 0.0
    with pytest.raises(ConstantsError, match=r"next_eps is 0\.0"):
        AttentionBoundary.build_reduced(_context(backbone), backbone.layers[0])


def test_tp16_runs_the_given_all_reduce_and_then_one_kernel(backbone, duals):
    layer = backbone.layers[0]
    boundary = AttentionBoundary.build(_context(backbone), layer, all_reduce=lambda x: ("reduced", x))
    assert duals == [planned_boundary(Deployment(), "sm_90a")]
    boundary.prepare_kv()
    boundary.run("partial", "stream", "out")
    partial, stream, post, alpha, beta, weight, out = duals[1]
    assert (partial, stream, post, out) == (("reduced", "partial"), "stream", None, "out")
    assert alpha is layer.add_attn.alpha
    assert beta is layer.add_attn.beta
    assert weight is layer.pre_ffn_norm.weight


def test_what_a_tensor_parallel_size_asks_for(backbone, duals):
    layer = backbone.layers[0]
    with pytest.raises(ValueError, match="TP16 needs the all-reduce"):
        AttentionBoundary.build(_context(backbone), layer)
    with pytest.raises(ValueError, match="no attention boundary at TP1"):
        AttentionBoundary.build(_context(backbone, 1), layer)
    with pytest.raises(ValueError, match="TP4 fuses its all-reduce"):
        AttentionBoundary.build(_context(backbone, 4), layer, all_reduce=lambda x: x)


def test_unsupported_is_a_noun_phrase_or_none():
    answers = {tp: AttentionBoundary.unsupported(vllm_config(tp)) for tp in (1, 2, 3, 4, 8, 16, 32)}
    assert answers == {1: "an attention boundary at TP1", 2: None, 3: "an attention boundary at TP3", 4: None, 8: None,
                       16: None, 32: "an attention boundary at TP32"}  # fmt: skip


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_one_fused_all_reduce_serves_every_layer(backbone, fakes, tp):
    _FakeFused.made = 0
    ctx = BuildContext(tp, _group(tp), torch.device("cpu"), backbone, "mnnvl")
    boundaries = [AttentionBoundary.build(ctx, layer) for layer in backbone.layers]
    assert _FakeFused.made == 1
    assert fused_all_reduce(ctx).made_with == ("device", "cpu", torch.device("cpu"), "mnnvl")
    assert [b.op.published for b in boundaries] == [tp == 8] * 2
    assert boundaries[0].op.constants == planned_boundary(Deployment(), "sm_90a")
    assert producer_mailbox(ctx) is (fused_all_reduce(ctx).mailbox if tp == 8 else None)
    other = BuildContext(tp, _group(tp), torch.device("cpu"), Model(layers=1).model, "mnnvl")
    assert fused_all_reduce(other) is not fused_all_reduce(ctx)


def test_a_device_group_alone_is_completed_by_the_engine(backbone, fakes, monkeypatch):
    monkeypatch.setattr(attention_boundary, "find_tp_group", lambda: _group(4))
    ctx = BuildContext(4, "device", torch.device("cpu"), backbone, "mnnvl")
    assert fused_all_reduce(ctx).made_with[:2] == ("device", "cpu")
    other = BuildContext(4, "another", torch.device("cpu"), Model(layers=1).model, "mnnvl")
    with pytest.raises(ValueError, match="takes the tensor parallel group of 4 ranks"):
        fused_all_reduce(other)


@pytest.mark.parametrize(
    ("group", "order", "message"),
    [
        (None, "mnnvl", "takes the tensor parallel group of 4 ranks"),
        (_group(8), "mnnvl", "takes the tensor parallel group of 4 ranks"),
        (_group(4), None, "TP4 has no fused all-reduce in the order of stock's"),
    ],
)
def test_a_wrong_group_or_an_unknown_order_is_refused(backbone, fakes, group, order, message):
    with pytest.raises(ValueError, match=message):
        fused_all_reduce(BuildContext(4, group, torch.device("cpu"), backbone, order))


def test_at_tp8_o_proj_publishes_into_the_boundarys_mailbox(backbone, fakes):
    ctx = BuildContext(8, _group(8), torch.device("cpu"), backbone, "mnnvl")
    projection = OProjection.build(ctx, backbone.layers[0], rows=(1, 2))
    weight = backbone.layers[0].self_attn.o_proj.weight
    made_with = projection.gemm.made_with
    assert made_with[0] is weight
    assert made_with[1:] == (fused_all_reduce(ctx).mailbox, OPROJ, (1, 2))
    out = torch.empty(2, H).bfloat16()
    assert projection.run(torch.ones(2, 512).bfloat16(), out) is out
    assert bool((out == 7).all())


def test_o_proj_is_torch_mm(backbone):
    layer = backbone.layers[1]
    projection = OProjection.build(_context(backbone), layer, rows=(1, 2))
    x = torch.randn(5, 512).bfloat16()
    out = torch.empty(5, H, dtype=torch.bfloat16)
    assert projection.run(x, out) is out
    assert torch.equal(out, torch.mm(x, layer.self_attn.o_proj.weight.t()))
    assert projection.run(x[:0], out[:0]).shape == (0, H)


@pytest.mark.parametrize(
    ("x", "out", "message"),
    [
        (torch.ones(2, 512), None, "^x must be torch.bfloat16"),
        (torch.ones(2, 500).bfloat16(), None, r"^x must have the shape \(2, 512\)"),
        (torch.ones(512, 2).bfloat16().t(), None, "^x must be contiguous"),
        (torch.ones(2 * 512 + 1).bfloat16()[1:].view(2, 512), None, "^x must be aligned to 16 bytes"),
        (None, torch.empty(3, H).bfloat16(), r"^out must have the shape \(2, 8192\)"),
        (None, torch.empty(2, H), "^out must be torch.bfloat16"),
    ],
)
def test_wrong_operands_of_o_proj_are_named(backbone, x, out, message):
    projection = OProjection.build(_context(backbone), backbone.layers[0], rows=(1,))
    x = torch.ones(2, 512).bfloat16() if x is None else x
    out = torch.empty(2, H).bfloat16() if out is None else out
    with pytest.raises(ValueError, match=message):
        projection.run(x, out)


TRANSPOSED = torch.ones(8, H).bfloat16().t()


class _QuantizedMethod:
    pass


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda o: setattr(o, "quant_method", _QuantizedMethod()), RuntimeError, "quantised; its method is _Quantized"),
        (lambda o: setattr(o, "quant_method", None), RuntimeError, "quantised; its method is NoneType"),
        (lambda o: setattr(o, "bias", torch.nn.Parameter(torch.ones(H))), RuntimeError, "must not have a bias"),
        (lambda o: setattr(o, "weight", torch.nn.Parameter(torch.ones(H, 512))), ValueError, "BF16 matrix"),
        (lambda o: setattr(o, "weight", torch.nn.Parameter(torch.ones(64, 512).bfloat16())), ValueError, "8192, K"),
        (lambda o: setattr(o, "weight", torch.nn.Parameter(TRANSPOSED)), ValueError, "contiguous"),
    ],
)  # fmt: skip
def test_wrong_o_projections_are_refused(backbone, change, error, message):
    change(backbone.layers[0].self_attn.o_proj)
    with pytest.raises(error, match=message):
        OProjection.build(_context(backbone), backbone.layers[0], rows=(1,))
