"""vLLM's own Muse Spark classes as far as they can be built without a GPU, and stand-ins for the rest.

Real: norms, residual connections with their materialised gates, the decoder layer's and the model's forward, the
attention's output projection, the streams, the configs. Stand-ins: attention itself (a slice) and the feed-forward
block (the identity), whose real classes need CUDA to be constructed.
"""

import json

import torch
from torch import nn
from vllm.config import DeviceConfig, ModelConfig, VllmConfig
from vllm.models.muse_spark.common.layers import materialize_residual_path_constants
from vllm.models.muse_spark.nvidia import model as stock

H = 8192


def text_config(**changes):
    """vLLM's text config with the released model's numbers."""
    from transformers.models.muse_spark import MuseSparkTextConfig as Defaults
    from vllm.transformers_utils.configs.muse_spark import MuseSparkTextConfig

    return MuseSparkTextConfig(**{**Defaults().to_dict(), "num_shared_experts": 0, **changes})


def config_file(folder):
    """A config.json of the released model in a folder, as a checkpoint has it; returns its path."""
    from transformers.models.muse_spark import MuseSparkConfig

    document = MuseSparkConfig().to_dict()
    document["text_config"]["num_shared_experts"] = 0
    document["architectures"] = ["MuseSparkForConditionalGeneration"]
    path = folder / "config.json"
    path.write_text(json.dumps(document, default=str))
    return path


def vllm_config(folder, tp=1, **options):
    """A real VllmConfig for the released model. No more than `tp` of its parallel config can be set on one CPU."""
    config_file(folder)
    model = ModelConfig(
        model=str(folder), tokenizer=str(folder), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=4096
    )
    config = VllmConfig(model_config=model, device_config=DeviceConfig(device="cpu"), **options)
    config.parallel_config.tensor_parallel_size = tp
    return config


def norm(seed=None, eps=1e-5, *, post=False, input_scale=False, residual_id=1, **options):
    """A real norm as the decoder layer makes it; its weight is random, or there is none without a seed."""
    cls = stock.MuseSpark1xRMSNormWithInputScale if input_scale else stock.MuseSpark1xRMSNorm
    made = cls(H, eps=eps, has_weight=seed is not None, is_post_norm=post, zero_centered_gamma=True,
               post_norm_gain_center_type="one", residual_id=residual_id, output_norm_gain_center_type="zero",
               **options)  # fmt: skip
    if seed is not None:
        made.weight = nn.Parameter(_random(seed, H), requires_grad=False)
    return made


def connection(seed):
    made = stock.MuseSpark1xNormPreservingResidualConnection(
        dim=H, temperature=0.3, use_stream_gate=True, channel_wise=True
    )
    made.gate = nn.Parameter(_random(seed, H), requires_grad=False)
    return made


def _random(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


class OProj(nn.Module):
    """A row-parallel linear layer of one rank, with vLLM's own method."""

    def __init__(self, weight):
        super().__init__()
        from vllm.model_executor.layers.linear import UnquantizedLinearMethod

        self.weight, self.bias = nn.Parameter(weight, requires_grad=False), None
        self.quant_method = UnquantizedLinearMethod()

    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight), None


class Attention(stock.MuseSpark1xAttention):
    """Stock's attention without attention."""

    def __init__(self, index, inputs):
        nn.Module.__init__(self)
        self.pre_qkv_proj_norm = norm(10 * index, residual_id=2 * index + 1)
        self.o_proj = OProj(_random(10 * index + 5, H, inputs) / inputs**0.5)
        self.is_sequence_parallel_output, self.gemm_rs = False, None

    def forward(self, positions, hidden_states):
        return self._project_output(hidden_states[:, : self.o_proj.weight.shape[1]].contiguous())


class FeedForward(nn.Module):
    use_mega_moe = False

    def forward(self, x):
        return x


class DecoderLayer(stock.MuseSpark1xDecoderLayer):
    """Stock's decoder layer with its own forward."""

    def __init__(self, index, inputs=512):
        nn.Module.__init__(self)
        self.layer_idx, self.hidden_size = index, H
        self.self_attn, self.feed_forward = Attention(index, inputs), FeedForward()
        self.post_attn_norm = norm(None, 1e-8, post=True, residual_id=2 * index + 1)
        self.pre_ffn_norm = norm(10 * index + 1, residual_id=2 * index + 2)
        self.post_ffn_norm = norm(10 * index + 2, 1e-8, post=True, input_scale=True, residual_id=2 * index + 2)
        self.add_attn, self.add_ffn = connection(10 * index + 3), connection(10 * index + 4)
        self.residual_dtype, self.default_dtype = torch.float32, torch.bfloat16
        self.all_gather_dual_norm = None
        self.is_sequence_parallel = self.is_sequence_parallel_input = False


class Backbone(stock.MuseSpark1xModel):
    """Stock's model with its own forward; its decorator's __call__ is replaced by the plain one."""

    def __init__(self, layers, inputs=512):
        nn.Module.__init__(self)
        self.do_not_compile = True
        self.layers = nn.ModuleList(DecoderLayer(i, inputs) for i in range(layers))
        self.norm, self.start_layer, self.end_layer = norm(99, residual_id=-1), 0, layers
        self.default_dtype, self.residual_dtype = torch.bfloat16, torch.float32
        self.fuse_across_layers, self.is_sequence_parallel, self.is_sequence_parallel_input = True, False, False
        self.table = _random(98, 128, H)

    def embed_input_ids(self, input_ids):
        return self.table[input_ids].float()


class Model(nn.Module):
    """The outer model, as load_model leaves it: gates materialised."""

    def __init__(self, layers=3, inputs=512):
        super().__init__()
        self.model = Backbone(layers, inputs)
        materialize_residual_path_constants(self)


def run_natively(monkeypatch):
    """Have real norms take their plain torch path: the Triton one cannot run without a GPU."""
    monkeypatch.setattr(stock.MuseSpark1xRMSNorm, "supports_fused_kernel", lambda self, x: False)
