"""What happens once the weights are loaded, before memory profiling captures the first CUDA graph.

Learn the constant sets from the layers, have exactly what will be launched compiled or found (the ranks of a host
share the work), load it onto the GPU, prove its bits against stock, replace the calls, and say so in one line.
"""

import dataclasses
import logging
from typing import Any

import torch

from muse_jit.constants.base import ConstantSet
from muse_jit.errors import LoadError
from muse_jit.key.target import arch_of_capability
from muse_jit.ops.attention_boundary import AttentionBoundary
from muse_jit.ops.context import BuildContext
from muse_jit.ops.device import pdl_supported, service_for
from muse_jit.ops.layer_front import LayerFront
from muse_jit.ops.stock_order import unknown_stock
from muse_jit.plan import ROWS
from muse_jit.settings import Settings
from muse_jit.vllm_plugin.deployment import SPECIALIZED, decode_backend, doubt, is_muse_spark, unsupported
from muse_jit.vllm_plugin.hooks import Refused
from muse_jit.vllm_plugin.layers import FRONT, Learned, backbone_of, learn, own_layers
from muse_jit.vllm_plugin.proof import boundary_differs, front_differs
from muse_jit.vllm_plugin.steps import Steps

logger = logging.getLogger("vllm.muse_jit")

BOUNDARY = "the attention boundary"
MAX_ROWS = ROWS[-1]
"""Tokens of the largest step that counts as decode-sized."""


@dataclasses.dataclass
class Started:
    """What the plugin did for a worker; kept on it as `muse_jit`."""

    service: Any
    report: Any
    learned: Learned
    steps: Steps | None = None
    used: str = "nothing is replaced"


def before_load(worker: Any) -> None:
    """Refuse what was asked for and cannot be had before an hour of loading weights.

    Raises:
        Refused: decode_backend is wrong, or the deployment is not one that the decode builder can serve.
    """
    config = worker.vllm_config
    if not is_muse_spark(config) or decode_backend(config) != SPECIALIZED:
        return
    if Settings.from_environ().vllm == "warm":
        logger.warning("muse_jit: decode_backend=%s is ignored with MUSE_JIT_VLLM=warm", SPECIALIZED)
        return
    from muse_jit.vllm_plugin.newer import hand_over, has_own_decode

    if has_own_decode():
        hand_over()
        return
    reason = unsupported(config)
    if reason is not None:
        raise Refused(f"the specialised decode of Muse Spark (muse_jit) does not support {reason}")


def after_load(worker: Any) -> None:
    """Prepare the kernels of a worker whose model is loaded, and replace stock calls as far as the mode says.

    Raises:
        Refused: the decode builder was asked for and cannot be built.
        Exception: anything else is for the caller to turn into one warning.
    """
    config, settings = worker.vllm_config, Settings.from_environ()
    if not is_muse_spark(config):
        return
    specialized = settings.vllm != "warm" and decode_backend(config) == SPECIALIZED
    if specialized:
        from muse_jit.vllm_plugin.newer import has_own_decode

        if has_own_decode():
            return
    previous = getattr(worker, "muse_jit", None)
    if previous is not None and previous.steps is not None:
        previous.steps.remove()
    reason = doubt(config) if settings.vllm == "auto" else None
    if reason is not None:
        logger.info("muse_jit: nothing is compiled or replaced: stock runs with %s", reason)
        return
    with torch.inference_mode():
        if specialized:
            from muse_jit.vllm_plugin.builder import build

            worker.muse_jit = build(worker)
        else:
            worker.muse_jit = _start(worker, replace=settings.vllm == "auto")


def when_ready(worker: Any) -> None:
    """vLLM is about to serve: from now on a compile is late and is reported."""
    started = getattr(worker, "muse_jit", None)
    if started is not None:
        started.service.serving()


def _start(worker: Any, *, replace: bool) -> Started:
    backbone = backbone_of(worker.model_runner.get_model())
    learned = learn(backbone, enable_pdl=pdl_or_default(worker.device))
    if replace and worker.device.type == "cuda":
        learned = of_known_stock(learned, arch_of_capability(torch.cuda.get_device_capability(worker.device)))
    started = obtain(worker.device, learned)
    if replace and worker.device.type == "cuda":
        _replace(started, context_of(worker, backbone))
    say(started)
    return started


def of_known_stock(learned: Learned, arch: str) -> Learned:
    """Without what would not be launched, because the order in which stock sums here is not known."""
    unknown: dict[ConstantSet, str | None] = {c: unknown_stock(arch, boundary=False) for c in learned.front}
    unknown |= {c: unknown_stock(arch, boundary=True) for c in learned.boundaries.values()}
    return learned.without({constants: why for constants, why in unknown.items() if why is not None})


def pdl_or_default(device: torch.device) -> bool:
    """Whether kernels for the device are launched dependently; without a device as they are planned."""
    return pdl_supported(device) if device.type == "cuda" else True


def obtain(device: torch.device, learned: Learned) -> Started:
    """Have the constant sets compiled or found and loaded into this process and onto its GPU.

    Kernels that cannot be had are left out of `learned`, with one warning.
    """
    service = service_for(device)
    wanted = learned.constants
    report = service.ensure(wanted)
    failed = {
        c: k.error or "no reason given" for c, k in zip(wanted, report.kernels, strict=True) if k.status == "failed"
    }
    if device.type == "cuda":
        _prepare([service.get(c) for c in wanted if c not in failed], device)
    started = Started(service, report, learned.without(failed))
    refused = started.learned.refused
    if refused:
        what, why = next(iter(refused.items()))
        more = f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""
        logger.warning("muse_jit: %s%s stays stock: %s", what, more, why)
    return started


def _prepare(kernels: list[Any], device: torch.device) -> None:
    """Load GPU modules now: during a capture it is too late. Where that fails, the objects' first launch does it."""
    index = device.index if device.index is not None else torch.cuda.current_device()
    try:
        for kernel in kernels:
            kernel.prepare(index)
    except LoadError as error:
        logger.warning("muse_jit: GPU modules are loaded by a first launch: %s", error)


def say(started: Started) -> None:
    """The one line of a start."""
    layers = len(started.learned.boundaries)
    logger.info("muse_jit: %s; %d layers; %s", started.report.summary(), layers, started.used)


def context_of(worker: Any, backbone: Any, **more: Any) -> BuildContext:
    """What the runtime objects of this rank are built with."""
    return BuildContext(
        tp=worker.vllm_config.parallel_config.tensor_parallel_size,
        group=more.get("group"),
        device=worker.device,
        backbone=backbone,
        all_reduce_order=more.get("all_reduce_order"),
        aux_layers=tuple(getattr(backbone, "aux_hidden_state_layers", ())),
    )


def _replace(started: Started, ctx: BuildContext) -> None:
    """Replace what is proven to write stock's bits; the rest stays stock with one warning each."""
    layers = {
        layer: i
        for i, layer in enumerate(own_layers(ctx.backbone), ctx.backbone.start_layer)
        if i in started.learned.boundaries
    }
    front = None
    if started.learned.front:
        front = LayerFront.build(ctx, ctx.backbone.layers[0], MAX_ROWS)
        why = front_differs(front, ctx.backbone.layers[0].self_attn.pre_qkv_proj_norm, ctx.device)
        front = None if unproven(FRONT, why) else front
    steps = Steps(ctx.backbone, front, max_rows=MAX_ROWS)
    boundaries = {layer: AttentionBoundary.build_reduced(ctx, layer) for layer in layers}
    boundaries = proven(steps, boundaries, ctx.device)
    if front is None and not boundaries:
        return
    steps.install(boundaries)
    started.steps = steps
    parts = [*(["LayerFront"] if front is not None else []), f"{len(boundaries)} attention boundaries"]
    started.used = f"{' and '.join(parts)} replace stock in steps of up to {MAX_ROWS} tokens"


def proven(
    steps: Steps, boundaries: dict[Any, AttentionBoundary], device: torch.device
) -> dict[Any, AttentionBoundary]:
    """Those boundaries whose kernel writes stock's bits; each kernel is tried once, with its first layer."""
    verdicts: dict[Any, bool] = {}
    for layer, boundary in boundaries.items():
        if boundary.op not in verdicts:
            why = boundary_differs(boundary, layer, steps.stock_boundary, steps.stream_class, device)
            verdicts[boundary.op] = not unproven(BOUNDARY, why)
    return {layer: boundary for layer, boundary in boundaries.items() if verdicts[boundary.op]}


def unproven(what: str, why: str | None) -> bool:
    """Whether there is a reason not to replace something; says it."""
    if why is not None:
        logger.warning("muse_jit: %s stays stock: %s", what, why)
    return why is not None
