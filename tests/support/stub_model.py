"""A model with the outward shape of stock's Muse Spark: what the plugin reads and wraps, and nothing behind it.

Norms and connections have stock's attributes, the decoder layer and the model its control flow. Attention is a slice
of its input, the feed-forward block the identity. What norms compute comes from a `Norms` object: in torch here, from
stock's compiled kernels on a GPU (`benchmarks/boundary.py`).
"""

import dataclasses
import types
from typing import Any

import torch
from torch import nn

H = 8192


class TorchNorms:
    """Stock's arithmetic in plain torch operations; equal results for equal inputs, on any device."""

    def row_norm(self, norm, x, out_dtype):
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + norm.variance_epsilon)
        if norm.has_weight:
            y = y * (norm.weight.float() + norm.fused_gain_center)
        return y.to(out_dtype)

    def dual_norm(self, post, connection, pre, branch, stream, out_dtype):
        new = connection.alpha * stream + connection.beta * self.row_norm(post, branch, torch.float32)
        return self.row_norm(pre, new, out_dtype), new


NORMS = TorchNorms()


class Norm(nn.Module):
    """The attributes of stock's norm. `weight`: None, or BF16 [width]."""

    def __init__(self, weight=None, eps=1e-5, gain=1.0, before=False, width=H):
        super().__init__()
        self.hidden_size, self.variance_epsilon, self.variance_size_override = width, eps, None
        self.has_weight, self.zero_centered_gamma, self.gain_center = weight is not None, True, 1.0
        self.fused_gain_center = gain if weight is not None else 0.0
        self.applies_weight_before_norm = before
        self.weight = None if weight is None else nn.Parameter(weight, requires_grad=False)

    def forward(self, x, residual=None, out_dtype=None):
        assert residual is None
        return NORMS.row_norm(self, x, out_dtype or x.dtype)


class Connection(nn.Module):
    """Gates as they are after loading: alpha and beta FP32 [width]."""

    def __init__(self, gate):
        super().__init__()
        self.gate = nn.Parameter(gate, requires_grad=False)
        beta = torch.sigmoid(gate.float() / 0.3)
        self.register_buffer("beta", beta)
        self.register_buffer("alpha", torch.sqrt(torch.clamp(1 - beta * beta, min=1e-3)))


class UnquantizedLinearMethod:
    """By the name of its class one sees that a linear layer is not quantised."""


class OProj(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight, self.bias, self.quant_method = nn.Parameter(weight, requires_grad=False), None, None
        self.quant_method = UnquantizedLinearMethod()

    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight), None


class Attention(nn.Module):
    def __init__(self, norm, o_proj):
        super().__init__()
        self.pre_qkv_proj_norm, self.o_proj = norm, o_proj

    def forward(self, positions, hidden_states):
        return self._project_output(hidden_states[:, : self.o_proj.weight.shape[1]].contiguous())

    def _project_output(self, attn_output):
        return self.o_proj(attn_output)[0]


@dataclasses.dataclass(slots=True)
class MuseSpark1xResidualStream:
    stream: torch.Tensor
    branch: torch.Tensor
    post_norm: Any
    connection: Any


def norm_residual_then_norm(x, pre_norm, *, out_dtype, router_input=None):
    out, new = NORMS.dual_norm(x.post_norm, x.connection, pre_norm, x.branch, x.stream, out_dtype)
    if router_input is not None:
        router_input.copy_(NORMS.row_norm(pre_norm, new, torch.float32))
    return out, new


class DecoderLayer(nn.Module):
    def __init__(self, index, width_in, random):
        super().__init__()
        self.layer_idx, self.residual_dtype, self.router_rows = index, torch.float32, None
        weight = random(H, width_in) / width_in**0.5
        self.self_attn = Attention(Norm(random(H) * 0.2), OProj(weight))
        self.post_attn_norm, self.pre_ffn_norm = Norm(None, 1e-8), Norm(random(H) * 0.2)
        self.post_ffn_norm = Norm(random(H) * 0.2, 1e-8, before=True)
        self.add_attn, self.add_ffn = Connection(random(H)), Connection(random(H))

    def forward(self, positions, x):
        norm = self.self_attn.pre_qkv_proj_norm
        if isinstance(x, torch.Tensor):
            attn_input, stream = norm(x, out_dtype=torch.bfloat16), x
        else:
            attn_input, stream = norm_residual_then_norm(x, norm, out_dtype=torch.bfloat16)
        branch = self.self_attn(positions=positions, hidden_states=attn_input)
        router_input = torch.empty_like(branch, dtype=torch.float32) if branch.shape[0] == self.router_rows else None
        boundary = MuseSpark1xResidualStream(stream, branch, self.post_attn_norm, self.add_attn)
        ffn_in, stream = norm_residual_then_norm(
            boundary, self.pre_ffn_norm, out_dtype=torch.bfloat16, router_input=router_input
        )
        return MuseSpark1xResidualStream(stream, ffn_in, self.post_ffn_norm, self.add_ffn)


class Backbone(nn.Module):
    def __init__(self, layers, width_in, device="cpu"):
        super().__init__()
        generator = torch.Generator(device=device).manual_seed(7)

        def random(*shape):
            return torch.randn(*shape, generator=generator, device=device).to(torch.bfloat16)

        self.layers = nn.ModuleList(DecoderLayer(i, width_in, random) for i in range(layers))
        self.norm = Norm(random(H) * 0.2, gain=0.0)
        self.table = random(128, H)
        self.start_layer, self.end_layer, self.aux_hidden_state_layers = 0, layers, ()
        self.keep_last, self.last = False, None  # the stream after the last attention boundary

    def embed_input_ids(self, input_ids):
        return self.table[input_ids].float()

    def forward(self, input_ids, positions, intermediate_tensors, inputs_embeds=None):
        hidden = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        x, aux = hidden.to(torch.float32), []
        if 0 in self.aux_hidden_state_layers:
            aux.append(x)
        for layer in self.layers:
            x = layer(positions, x)
        self.last = x.stream.clone() if self.keep_last else None
        out, _ = norm_residual_then_norm(x, self.norm, out_dtype=torch.bfloat16)
        return (out, aux) if aux else out


class Model(nn.Module):
    """The outer model: `model` is the part with the layers."""

    def __init__(self, layers=3, width_in=512, device="cpu"):
        super().__init__()
        self.model = Backbone(layers, width_in, device)


def vllm_config(tp=16, **changes):
    """A VllmConfig as far as it is read: Muse Spark with vLLM's defaults on a GPU."""
    mode = types.SimpleNamespace
    graphs = mode(decode_mode=lambda: mode(name="FULL"), mixed_mode=lambda: mode(name="PIECEWISE"))
    text = mode(
        model_type="muse_spark_text", hidden_size=H, num_attention_heads=128, head_dim=64, rms_norm_eps=1e-5,
        post_norm_eps=1e-8,
    )  # fmt: skip
    config = mode(
        model_config=mode(hf_text_config=text, model="muse", enable_sleep_mode=False),
        parallel_config=mode(tensor_parallel_size=tp, pipeline_parallel_size=1, use_ubatching=False),
        compilation_config=mode(mode=None, cudagraph_mode=graphs, cudagraph_capture_sizes=[1, 2, 4, 8, 16]),
        offload_config=mode(uva=mode(cpu_offload_gb=0), prefetch=mode(offload_group_size=0)),
        speculative_config=None,
        lora_config=None,
        use_v2_model_runner=True,
        additional_config={},
    )
    for path, value in changes.items():
        *owners, name = path.split("__")
        owner = config
        for part in owners:
            owner = getattr(owner, part)
        setattr(owner, name, value)
    return config


class Worker:
    """A worker as far as the plugin looks at it."""

    def __init__(self, model, config, device="cpu"):
        self.vllm_config, self.device = config, torch.device(device)
        self.model_runner = types.SimpleNamespace(get_model=lambda: model)
