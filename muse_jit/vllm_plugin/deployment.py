"""What is read from a VllmConfig: whether it is Muse Spark, its plan, what was asked for, and what cannot be had."""

from collections.abc import Iterable
from typing import Any

from muse_jit.ops.attention_boundary import AttentionBoundary
from muse_jit.plan import MUSE_SPARK, Deployment, ModelConfig, Plan, make_plan, model_of
from muse_jit.vllm_plugin.hooks import Refused

MODEL_TYPE = "muse_spark_text"
AUTO, SPECIALIZED = "auto", "latency_specialized"
_FIELDS = ("hidden_size", "num_attention_heads", "head_dim", "rms_norm_eps", "post_norm_eps")


def is_muse_spark(vllm_config: Any) -> bool:
    """Whether the target model is Muse Spark, by the type of its text config."""
    model = getattr(vllm_config, "model_config", None)
    return getattr(getattr(model, "hf_text_config", None), "model_type", None) == MODEL_TYPE


def model_config(vllm_config: Any) -> ModelConfig:
    """The numbers that reach kernel constants.

    Raises:
        UsageError: the text config lacks one.
    """
    text = vllm_config.model_config.hf_text_config
    fields = {name: getattr(text, name, None) for name in _FIELDS}
    return model_of(str(getattr(vllm_config.model_config, "model", "the model")), fields)


def plan_of(vllm_config: Any, arches: Iterable[str], order: str | None = None) -> Plan:
    """The plan of a deployment: the list that `muse-jit warmup --model ... --tp ...` makes for it.

    `order`: whose order the norms have; default, what stock would run in this process.

    Raises: as `make_plan` and `model_config`.
    """
    from muse_jit.ops.stock_order import stock_order

    tp = vllm_config.parallel_config.tensor_parallel_size
    deployment = Deployment(model_config(vllm_config), tp, order=stock_order() if order is None else order)
    return make_plan(deployment, arches)


def decode_backend(vllm_config: Any) -> str:
    """What `--additional-config` asks for under decode_backend: "auto" or "latency_specialized".

    Raises:
        Refused: it asks for something else.
    """
    extra = getattr(vllm_config, "additional_config", None)
    asked = extra.get("decode_backend", AUTO) if isinstance(extra, dict) else AUTO
    if asked not in (AUTO, SPECIALIZED):
        raise Refused(f"decode_backend is {asked!r}; allowed: {AUTO}, {SPECIALIZED}")
    return str(asked)


def doubt(vllm_config: Any) -> str | None:
    """Why stock calls must not be replaced in this deployment even where bits are equal; None where they may."""
    try:
        parallel, compilation = vllm_config.parallel_config, vllm_config.compilation_config
        offload = vllm_config.offload_config
        checks = (
            (parallel.pipeline_parallel_size != 1, "pipeline parallelism"),
            # Two forward passes at a time would share what one step hands on.
            (parallel.use_ubatching, "DBO or microbatches"),
            (offload.uva.cpu_offload_gb > 0 or offload.prefetch.offload_group_size > 0, "weights offloaded to the CPU"),
            (compilation.mode is not None and compilation.mode.name == "STOCK_TORCH_COMPILE", "torch.compile"),
        )
    except AttributeError as error:
        return f"a vLLM whose configuration is another ({error})"
    return next((reason for holds, reason in checks if holds), None)


def unsupported(vllm_config: Any) -> str | None:
    """Why the decode builder cannot serve this deployment, as a noun phrase; None where it can."""
    try:
        return (
            doubt(vllm_config)
            or _shapes(vllm_config)
            or _modes(vllm_config)
            or AttentionBoundary.unsupported(vllm_config)
        )
    except AttributeError as error:
        return f"a vLLM whose configuration is another ({error})"


def _shapes(vllm_config: Any) -> str | None:
    found = model_config(vllm_config)
    for name in ("hidden_size", "num_attention_heads", "head_dim"):
        if getattr(found, name) != getattr(MUSE_SPARK, name):
            return f"{name} {getattr(found, name)} (Muse Spark's is {getattr(MUSE_SPARK, name)})"
    return None


def _modes(vllm_config: Any) -> str | None:
    graphs = vllm_config.compilation_config.cudagraph_mode
    speculative = vllm_config.speculative_config
    checks = (
        (vllm_config.lora_config is not None, "LoRA"),
        (vllm_config.model_config.enable_sleep_mode, "sleep mode"),
        (not vllm_config.use_v2_model_runner, "the V1 model runner"),
        # The objects run in FULL decode graphs; eager and PIECEWISE steps run stock.
        (
            graphs is None or graphs.decode_mode().name != "FULL",
            "deployments without FULL decode CUDA graphs (enforce-eager, for instance)",
        ),
        # While a graph is captured, a mixed batch cannot be told from a decode batch.
        (graphs is not None and graphs.mixed_mode().name == "FULL", "FULL CUDA graphs of mixed batches"),
        (speculative is not None and speculative.method != "dspark", "speculative methods but DSpark"),
    )
    return next((reason for holds, reason in checks if holds), None)
