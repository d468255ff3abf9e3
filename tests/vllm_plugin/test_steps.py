"""Which calls of a forward pass are replaced, on a model of stock's shape, with runtime objects in plain torch."""

import dataclasses

import pytest
import torch
from support import stub_model
from support.stub_model import NORMS, H, Model, MuseSpark1xResidualStream

from muse_jit.ops.attention_boundary import AttentionBoundary
from muse_jit.vllm_plugin.steps import Steps


class TorchFront:
    """LayerFront in torch."""

    INPUT_DTYPES, hidden = (torch.bfloat16, torch.float32), H

    def __init__(self, norm):
        self.norm = norm

    def run(self, x, stream, out):
        stream.copy_(x)
        out.copy_(NORMS.row_norm(self.norm, stream, torch.bfloat16))


class TorchDual:
    """DualNorm in torch, in place as ours."""

    def __init__(self, layer):
        self.layer = layer

    def run(self, partial, stream, post_weight, alpha, beta, next_weight, out):
        layer = self.layer
        result, new = NORMS.dual_norm(
            layer.post_attn_norm, layer.add_attn, layer.pre_ffn_norm, partial, stream, torch.bfloat16
        )
        stream.copy_(new)
        out.copy_(result)


class TorchProjection:
    """OProjection in torch, as if this rank held a part: the all-reduce of the test doubles it."""

    def __init__(self, layer):
        self.weight = layer.self_attn.o_proj.weight
        self.inputs = self.weight.shape[1]

    def run(self, x, out):
        return torch.mm(x, self.weight.t(), out=out)


def _boundaries(backbone, all_reduce=None):
    return {
        layer: AttentionBoundary(
            TorchDual(layer), all_reduce, (None, layer.add_attn.alpha, layer.add_attn.beta, layer.pre_ffn_norm.weight)
        )
        for layer in backbone.layers
    }


@pytest.fixture
def backbone():
    return Model().model


def _steps(backbone, *, front=True, **options):
    made = TorchFront(backbone.layers[0].self_attn.pre_qkv_proj_norm) if front else None
    return Steps(backbone, made, max_rows=64, **options)


def _run(backbone, rows, dtype=torch.bfloat16, ids=False):
    embeds = torch.randn(rows, H, generator=torch.Generator().manual_seed(rows)).to(dtype)
    kept = embeds.clone()
    positions = torch.arange(rows)
    if ids:
        return backbone(positions % 128, positions, None)
    out = backbone(None, positions, None, inputs_embeds=embeds)
    assert torch.equal(embeds, kept), "the caller's embeddings were changed"
    return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, 5, 64])
def test_a_step_gives_the_same_bits_and_every_object_is_used(backbone, rows, dtype):
    expected = _run(backbone, rows, dtype)
    steps = _steps(backbone)
    steps.install(_boundaries(backbone))
    assert torch.equal(_run(backbone, rows, dtype), expected)
    assert steps.launches == {"front": 1, "boundary": 3, "o_proj": 0}
    steps.remove()
    assert torch.equal(_run(backbone, rows, dtype), expected)
    assert steps.launches["boundary"] == 3


def test_token_ids_are_embedded_by_stock(backbone):
    expected = _run(backbone, 6, ids=True)
    steps = _steps(backbone)
    steps.install(_boundaries(backbone))
    assert torch.equal(_run(backbone, 6, ids=True), expected)
    assert steps.launches["front"] == 1


def test_larger_steps_run_stock(backbone):
    expected = _run(backbone, 65)
    steps = _steps(backbone)
    steps.install(_boundaries(backbone))
    assert torch.equal(_run(backbone, 65), expected)
    assert steps.launches == {"front": 0, "boundary": 0, "o_proj": 0}


def test_without_a_front_the_first_boundary_is_stock(backbone):
    """Its stream is the caller's tensor, which must not be changed in place."""
    expected = _run(backbone, 4, torch.float32)
    steps = _steps(backbone, front=False)
    steps.install(_boundaries(backbone))
    assert torch.equal(_run(backbone, 4, torch.float32), expected)
    assert steps.launches == {"front": 0, "boundary": 2, "o_proj": 0}


def test_a_stream_that_somebody_else_holds_is_never_changed(backbone):
    """A draft model that taps the stream before layer 0: there is no front then, and the tap keeps its values."""
    backbone.aux_hidden_state_layers = (0,)
    out, (tap,) = _run(backbone, 4)
    steps = _steps(backbone, front=False)
    steps.install(_boundaries(backbone))
    again, (tap_again,) = _run(backbone, 4)
    assert torch.equal(out, again)
    assert torch.equal(tap, tap_again)


def test_a_router_that_wants_the_unrounded_input_gets_stock(backbone):
    backbone.layers[1].router_rows = 4
    expected = _run(backbone, 4)
    steps = _steps(backbone)
    steps.install(_boundaries(backbone))
    assert torch.equal(_run(backbone, 4), expected)
    assert steps.launches["boundary"] == 2


@pytest.mark.parametrize("change", ["weight", "gate", "post_norm"])
def test_changed_weights_run_stock(backbone, change):
    steps = _steps(backbone)
    steps.install(_boundaries(backbone))
    layer = backbone.layers[1]
    if change == "weight":
        layer.pre_ffn_norm.weight = torch.nn.Parameter(layer.pre_ffn_norm.weight * 2, requires_grad=False)
    elif change == "gate":
        layer.add_attn.beta = layer.add_attn.beta * 0.5
    else:
        layer.post_attn_norm = stub_model.Norm(None, 1e-3)
    found = _run(backbone, 4)
    assert steps.launches["boundary"] == 2
    steps.remove()
    assert torch.equal(found, _run(backbone, 4))


def test_another_class_of_stream_runs_stock(backbone):
    @dataclasses.dataclass(slots=True)
    class Sharded(MuseSpark1xResidualStream):
        pass

    steps = _steps(backbone)
    steps.install(_boundaries(backbone))
    layer = backbone.layers[0]
    branch, stream = torch.ones(2, H).bfloat16(), torch.ones(2, H)
    steps.active, steps.owned = True, stream
    x = Sharded(stream, branch, layer.post_attn_norm, layer.add_attn)
    stub_model.norm_residual_then_norm(x, layer.pre_ffn_norm, out_dtype=torch.bfloat16)
    assert steps.launches["boundary"] == 0
    assert torch.equal(stream, torch.ones(2, H))


def test_steps_that_are_not_taken_run_stock(backbone):
    asked = []
    steps = _steps(backbone, takes=lambda rows: bool(asked.append(rows)))
    steps.install(_boundaries(backbone), {layer: TorchProjection(layer) for layer in backbone.layers})
    _run(backbone, 3)
    assert asked == [3]
    assert steps.launches == {"front": 0, "boundary": 0, "o_proj": 0}


def _double(partial):
    return partial * 2


def _doubled(backbone):
    """The same model whose stock o_proj includes the all-reduce."""
    for layer in backbone.layers:
        stock = layer.self_attn.o_proj.forward
        layer.self_attn.o_proj.forward = lambda x, stock=stock: (_double(stock(x)[0]), None)


def test_the_decode_builder_reduces_each_partial_sum_once(backbone):
    _doubled(backbone)
    expected = _run(backbone, 8)
    steps = _steps(backbone, takes=lambda rows: True)
    steps.install(_boundaries(backbone, _double), {layer: TorchProjection(layer) for layer in backbone.layers})
    assert torch.equal(_run(backbone, 8), expected)
    assert steps.launches == {"front": 1, "boundary": 3, "o_proj": 3}
    backbone.layers[1].router_rows = 8
    assert torch.equal(_run(backbone, 8), expected)
    assert steps.launches == {"front": 2, "boundary": 5, "o_proj": 6}


def test_a_partial_sum_that_goes_astray_is_an_error(backbone):
    """Somebody between o_proj and the boundary made another tensor of it: it must not be used unreduced."""
    steps = _steps(backbone, takes=lambda rows: True)
    steps.install(_boundaries(backbone, _double), {layer: TorchProjection(layer) for layer in backbone.layers})
    attention = backbone.layers[1].self_attn
    project = attention._project_output
    attention._project_output = lambda attn_output: project(attn_output) + 0
    with pytest.raises(RuntimeError, match="did not reach its attention boundary"):
        _run(backbone, 2)
    assert steps.partial is None


def test_nothing_is_kept_after_a_step(backbone):
    steps = _steps(backbone)
    steps.install(_boundaries(backbone))
    _run(backbone, 2)
    assert (steps.active, steps.embedded, steps.owned, steps.partial) == (False, None, None, None)


def test_a_model_whose_calls_are_others_is_not_touched(backbone):
    class Other(torch.nn.Module):
        def forward(self, positions, x):
            return x

    backbone.layers = torch.nn.ModuleList([Other()])
    with pytest.raises(ValueError, match="Other has no norm_residual_then_norm to replace"):
        _steps(backbone, front=False)


def test_other_parameters_are_refused(backbone):
    steps = _steps(backbone)
    steps.stock_forward = lambda ids: None
    with pytest.raises(ValueError, match="takes ids; expected: input_ids, positions"):
        steps.install(_boundaries(backbone))
    assert "forward" not in vars(backbone)
