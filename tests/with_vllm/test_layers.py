"""Constants read from vLLM's own norms and connections, and the real forward through the runtime objects' places."""

import pytest
import torch
from support.real_model import DecoderLayer, H, Model, norm, run_natively, stock, text_config, vllm_config

from muse_jit.constants.dual_norm import DualNormConstants
from muse_jit.constants.row_norm import RowNormConstants
from muse_jit.ops import attention_boundary
from muse_jit.ops.attention_boundary import AttentionBoundary
from muse_jit.ops.context import BuildContext
from muse_jit.ops.o_projection import OProjection
from muse_jit.ops.stock_layer import boundary_constants, row_norm_constants
from muse_jit.plan import Deployment, make_plan
from muse_jit.vllm_plugin.layers import backbone_of, learn
from muse_jit.vllm_plugin.steps import Steps, stock_calls

ORDER = {"norm_order": "triton-3.8", "boundary_order": "triton-3.8"}


@pytest.fixture(scope="module")
def backbone():
    return backbone_of(Model())


def test_the_documented_sets_are_read_from_real_layers(backbone):
    learned = learn(backbone, enable_pdl=True, **ORDER)
    assert learned.refused == {}
    common = {
        "hidden": 8192,
        "eps": 1e-5,
        "has_weight": True,
        "gain_center": 1.0,
        "stream": True,
        "release_early": True,
    }
    assert learned.front == (RowNormConstants(**common), RowNormConstants(**common, x_fp32=True))
    boundary = DualNormConstants(8192, 1e-8, next_eps=1e-5, next_gain_center=1.0, release_early=True)
    assert learned.boundaries == dict.fromkeys(range(3), boundary)


NORMS = ("row_norm", "dual_norm")
"""What a start without options replaces; the GEMM and the fused all-reduce are the decode builder's."""


def test_what_is_read_from_the_layers_is_the_plan(backbone):
    planned = {p.constants for p in make_plan(Deployment(), ["sm_90a"]).kernels if p.constants.family in NORMS}
    assert set(learn(backbone, enable_pdl=True, **ORDER).constants) == planned


def test_the_other_boundaries_and_norms(backbone):
    layer = backbone.layers[0]
    plain = {"order": "triton-3.8", "enable_pdl": False}
    for following, gain in ((backbone.layers[1].self_attn.pre_qkv_proj_norm, 1.0), (backbone.norm, 0.0)):
        assert boundary_constants(layer.post_ffn_norm, layer.add_ffn, following, **plain) == DualNormConstants(
            8192, 1e-8, "before", 1.0, next_eps=1e-5, next_gain_center=gain, enable_pdl=False
        )
    embedding = stock.MuseSpark1xRMSNorm(8192, eps=1e-5, has_weight=False)
    assert row_norm_constants(embedding, enable_pdl=False, x_fp32=False, order="triton-3.8") == RowNormConstants(
        hidden=8192, eps=1e-5, has_weight=False, enable_pdl=False
    )


def test_gates_are_materialised_as_documented(backbone):
    for connection in (backbone.layers[0].add_attn, backbone.layers[2].add_ffn):
        for gate in (connection.alpha, connection.beta):
            assert (gate.dtype, tuple(gate.shape), gate.is_contiguous()) == (torch.float32, (H,), True)


def _context(backbone):
    return BuildContext(16, None, torch.device("cpu"), backbone)


def _refused(layer, backbone=None):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        AttentionBoundary.build(_context(backbone), layer, all_reduce=lambda x: x)
    return str(caught.value)


def _layer(**changes):
    """A layer of its own, gates materialised, with some attributes replaced."""
    layer = DecoderLayer(0)
    stock.materialize_residual_path_constants(layer)
    for name, value in changes.items():
        setattr(layer, name, value)
    return layer


def test_refusals_on_real_layers():
    assert "full hidden size, not 4096" in _refused(_layer(pre_ffn_norm=norm(1, var_hidden_size=4096)))
    assert "full hidden size, not 4096" in _refused(_layer(post_attn_norm=norm(None, post=True, var_hidden_size=4096)))
    narrow = stock.MuseSpark1xRMSNorm(4096, has_weight=False)
    assert "4096 columns and the next norm 8192" in _refused(_layer(post_attn_norm=narrow))
    assert "no gates alpha and beta" in _refused(_layer(add_attn=stock.MuseSpark1xResidualConnection()))
    unloaded = DecoderLayer(0)
    assert "are the weights loaded" in _refused(unloaded)
    small = stock.MuseSpark1xNormPreservingResidualConnection(dim=64)
    small.materialize_coefficients()
    assert "beta has 64" in _refused(_layer(add_attn=small))
    assert "not torch.bfloat16" in _refused(_layer(residual_dtype=torch.bfloat16))
    assert "needs a decoder layer" in _refused(None)


def test_a_scalar_gate_is_another_kernel():
    scalar = stock.MuseSpark1xNormPreservingResidualConnection(dim=H, channel_wise=False, use_stream_gate=False)
    torch.nn.init.zeros_(scalar.gate)
    scalar.materialize_coefficients()
    layer = _layer(add_attn=scalar)
    read = boundary_constants(layer.post_attn_norm, scalar, layer.pre_ffn_norm, order="triton-3.8")
    assert (read.gate, read.alpha_tensor, read.alpha) == ("scalar", False, 1.0)


def test_the_draft_models_layer_is_refused(backbone):
    """Its class has a forward of its own, in which the boundary is not the dual norm."""
    from vllm.models.muse_spark.common.dspark import MuseSparkDSparkDecoderLayer

    draft = _layer()
    draft.__class__ = MuseSparkDSparkDecoderLayer
    assert "not one of the target model's" in _refused(draft, backbone)
    with pytest.raises(ValueError, match="MuseSparkDSparkDecoderLayer has no norm_residual_then_norm"):
        stock_calls(MuseSparkDSparkDecoderLayer)


def test_o_projections(backbone):
    layer = backbone.layers[0]
    projection = OProjection.build(_context(backbone), layer, rows=(1,))
    x = torch.randn(4, 512).bfloat16()
    out = projection.run(x, torch.empty(4, H, dtype=torch.bfloat16))
    assert torch.equal(out, layer.self_attn._project_output(x))
    from vllm.model_executor.layers.quantization.modelopt import ModelOptLinearMethod

    other = _layer()
    other.self_attn.o_proj.quant_method = ModelOptLinearMethod.__new__(ModelOptLinearMethod)
    with pytest.raises(RuntimeError, match="must not be quantised; its method is ModelOptLinearMethod"):
        OProjection.build(_context(None), other)
    other = _layer()
    other.self_attn.o_proj.bias = torch.nn.Parameter(torch.zeros(H))
    with pytest.raises(RuntimeError, match="must not have a bias"):
        OProjection.build(_context(None), other)


class _Front:
    INPUT_DTYPES, hidden = (torch.bfloat16, torch.float32), H

    def __init__(self, norm):
        self.norm = norm

    def run(self, x, stream, out):
        stream.copy_(x)
        out.copy_(self.norm.forward_native(stream, None, torch.bfloat16))


class _Dual:
    """The dual norm in stock's own native steps, in place as ours."""

    def __init__(self, layer):
        self.layer = layer

    def run(self, partial, stream, post_weight, alpha, beta, next_weight, out):
        layer = self.layer
        stream.copy_(layer.add_attn(branch=layer.post_attn_norm.forward_native(partial), stream=stream))
        out.copy_(layer.pre_ffn_norm.forward_native(stream, None, torch.bfloat16))


@pytest.mark.parametrize("builder", [False, True])
@pytest.mark.parametrize("ids", [False, True])
def test_stocks_own_forward_runs_through_the_objects(backbone, monkeypatch, parallel_state, builder, ids):
    """The real MuseSpark1xModel.forward and MuseSpark1xDecoderLayer.forward, bit for bit the same."""
    run_natively(monkeypatch)
    positions = torch.arange(7)
    embeds = None if ids else torch.randn(7, H, generator=torch.Generator().manual_seed(3)).bfloat16()

    def run():
        return backbone(positions if ids else None, positions, None, inputs_embeds=embeds)

    expected = run()
    monkeypatch.setattr(attention_boundary, "standalone_dual_norm", lambda constants: None)
    steps = Steps(backbone, _Front(backbone.layers[0].self_attn.pre_qkv_proj_norm), max_rows=64)
    boundaries, projections = {}, {}
    for layer in backbone.layers:
        b = boundaries[layer] = AttentionBoundary.build_reduced(_context(backbone), layer)
        b.op = _Dual(layer)
        if builder:
            b.all_reduce = lambda partial: partial.clone()
            projections[layer] = OProjection.build(_context(backbone), layer, rows=(7,))
    steps.install(boundaries, projections)
    try:
        assert torch.equal(run(), expected)
        assert steps.launches == {"front": 1, "boundary": 3, "o_proj": 3 if builder else 0}
    finally:
        steps.remove()
    assert torch.equal(run(), expected)


def test_the_text_config_has_the_planned_numbers(tmp_path):
    from muse_jit.plan import MUSE_SPARK
    from muse_jit.vllm_plugin.deployment import is_muse_spark, model_config

    config = vllm_config(tmp_path)
    assert is_muse_spark(config)
    found = model_config(config)
    assert {**vars(found), "name": ""} == {**vars(MUSE_SPARK), "name": ""}
    assert text_config().model_type == "muse_spark_text"
