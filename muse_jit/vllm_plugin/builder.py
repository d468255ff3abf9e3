"""The decode builder for vLLM 0.33.0, which has none of its own for Muse Spark: decode_backend=latency_specialized.

Every layer gets an OProjection and an AttentionBoundary, the first one a LayerFront; FULL decode graphs of up to 64
tokens are captured through them. Prefill, mixed, eager, PIECEWISE and larger steps run stock.
"""

import logging
from typing import Any

import torch

from muse_jit.ops.attention_boundary import AttentionBoundary
from muse_jit.ops.context import ALL_REDUCE_TPS, FUSED_TPS
from muse_jit.ops.layer_front import LayerFront
from muse_jit.ops.o_projection import OProjection
from muse_jit.vllm_plugin.hooks import Refused
from muse_jit.vllm_plugin.layers import FRONT, backbone_of, learn, own_layers
from muse_jit.vllm_plugin.proof import boundary_differs, front_differs
from muse_jit.vllm_plugin.start import (
    BOUNDARY,
    MAX_ROWS,
    Started,
    context_of,
    obtain,
    pdl_or_default,
    say,
)
from muse_jit.vllm_plugin.steps import Steps, decode_step

logger = logging.getLogger("vllm.muse_jit")


def build(worker: Any) -> Started:
    """Build every layer's runtime objects and have decode graphs captured through them.

    Collective over the tensor parallel group: every rank builds the same layers in the same order.

    Raises:
        Refused: an object cannot be built, or a layer is not one it can be built for; the reason.
    """
    try:
        return _build(worker)
    except Exception as error:
        raise Refused(f"the specialised decode of Muse Spark (muse_jit) cannot be built: {error}") from error


def _build(worker: Any) -> Started:
    import vllm.forward_context as contexts
    from vllm.distributed import get_tp_group, tensor_model_parallel_all_reduce

    backbone, group = backbone_of(worker.model_runner.get_model()), get_tp_group()
    started = obtain(worker.device, learn(backbone, enable_pdl=pdl_or_default(worker.device)))
    if started.learned.refused:
        what, why = next(iter(started.learned.refused.items()))
        raise ValueError(f"{what}: {why}")
    tp = worker.vllm_config.parallel_config.tensor_parallel_size
    order = stock_sum_order(group) if tp in FUSED_TPS else None
    ctx = context_of(worker, backbone, group=group, all_reduce_order=order)
    all_reduce = tensor_model_parallel_all_reduce if tp in ALL_REDUCE_TPS else None
    rows = _rows(worker.vllm_config)
    layers = own_layers(backbone)
    projections = {layer: OProjection.build(ctx, layer, rows=rows) for layer in layers}
    boundaries = {layer: AttentionBoundary.build(ctx, layer, all_reduce=all_reduce) for layer in layers}
    front = LayerFront.build(ctx, layers[0], MAX_ROWS)
    steps = Steps(backbone, front, max_rows=MAX_ROWS, takes=decode_step(contexts))
    _compare(steps, front, boundaries, worker.device)
    steps.install(boundaries, projections)
    started.steps = steps
    started.used = f"the specialised decode serves FULL decode graphs of up to {MAX_ROWS} tokens"
    say(started)
    return started


def _compare(steps: Steps, front: LayerFront, boundaries: dict[Any, AttentionBoundary], device: torch.device) -> None:
    """Say where bits differ from stock's; the builder was asked for by name, so it goes on."""
    layer, boundary = next(iter(boundaries.items()))
    differs = {FRONT: front_differs(front, layer.self_attn.pre_qkv_proj_norm, device)}
    if boundary.all_reduce is not None:  # without it the all-reduce is part of the kernel, and collective
        stock = steps.stock_boundary
        differs[BOUNDARY] = boundary_differs(boundary, layer, stock, steps.stream_class, device)
    for what, why in differs.items():
        if why is not None:
            logger.warning("muse_jit: %s is not bit for bit stock's: %s", what, why)


def _rows(vllm_config: Any) -> tuple[int, ...]:
    """The steps that graphs are captured for, as far as they are decode-sized."""
    sizes = vllm_config.compilation_config.cudagraph_capture_sizes or ()
    return tuple(sorted({size for size in sizes if size <= MAX_ROWS} | {MAX_ROWS}))


def stock_sum_order(group: Any) -> str | None:
    """The order in which stock's all-reduce sums decode-sized steps here; None where it is no order we have.

    FlashInfer's all-reduce settles its backend when it is first used; that is made to happen here, on every rank.
    """
    import vllm.distributed.device_communicators.flashinfer_all_reduce as stock

    communicator = getattr(getattr(group, "device_communicator", None), "fi_ar_comm", None)
    if communicator is None or communicator.disabled:
        return None
    sample = torch.empty(1, 8192, dtype=torch.bfloat16, device=group.device)
    if not communicator.should_use_fi_ar(sample):
        return None
    backend = getattr(getattr(stock, "_fi_ar_workspace", None), "backend", None)
    return {"mnnvl": "mnnvl", "trtllm": "node-local"}.get(str(backend))
