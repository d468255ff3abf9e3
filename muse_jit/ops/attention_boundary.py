"""AttentionBoundary: from a rank's o_proj partial sum to the input of the feed-forward block."""

import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch

from muse_jit.constants.dual_norm import DualNormConstants
from muse_jit.ops.all_reduce_dual_norm import AllReduceDualNorm
from muse_jit.ops.context import ALL_REDUCE_TPS, FUSED_TPS, H
from muse_jit.ops.dual_norm import standalone_dual_norm
from muse_jit.ops.lamport_mailbox import LamportMailbox
from muse_jit.ops.stock_layer import boundary_constants, require_target_layer
from muse_jit.plan import PACKAGE_GEMM_TPS

logger = logging.getLogger("muse_jit")

AllReduce = Callable[[torch.Tensor], torch.Tensor]
Weights = tuple[torch.Tensor | None, torch.Tensor | float, torch.Tensor, torch.Tensor | None]

find_tp_group: Callable[[], Any] | None = None
"""How the process's tensor parallel group is found, where an engine's builder gives a device group only."""

_fused: "weakref.WeakKeyDictionary[Any, AllReduceDualNorm]" = weakref.WeakKeyDictionary()


class AttentionBoundary:
    """All-reduce of a partial sum, post_attn_norm, gated addition into the stream in place, pre_ffn_norm.

    At TP16 the all-reduce is the one that is given and the rest one kernel; at TP2, 4 and 8 all of it is one object,
    shared by every layer. Both are bit for bit stock's all-reduce followed by stock's dual norm.
    """

    def __init__(self, op: Any, all_reduce: AllReduce | None, weights: Weights) -> None:
        self.op, self.all_reduce = op, all_reduce
        self.post_weight, self.alpha, self.beta, self.next_weight = weights

    @classmethod
    def unsupported(cls, vllm_config: Any) -> str | None:
        """Why this deployment cannot have the boundary, as a noun phrase; None where it can."""
        tp = vllm_config.parallel_config.tensor_parallel_size
        return None if tp in (*FUSED_TPS, *ALL_REDUCE_TPS) else f"an attention boundary at TP{tp}"

    @classmethod
    def build(cls, ctx: Any, layer: Any, *, all_reduce: AllReduce | None = None) -> "AttentionBoundary":
        """From a stock decoder layer of `ctx.backbone`; `all_reduce` exactly at TP16.

        At TP2, 4 and 8 the first call is collective over the tensor parallel group: every rank builds the same layers
        in the same order.

        Raises:
            ValueError: no layer, a layer of a draft model, another hidden size, a norm over a part of it, gates that
                are not there, an all-reduce too many or missing, or no boundary at this tensor parallel size.
            CompileDuringCapture: a CUDA graph is being captured.
        """
        constants, weights = _read(ctx, layer)
        if ctx.tp in FUSED_TPS:
            if all_reduce is not None:
                raise ValueError(f"TP{ctx.tp} fuses its all-reduce; none must be given")
            op: Any = fused_all_reduce(ctx).bind(constants, published=producer_mailbox(ctx) is not None)
        elif ctx.tp in ALL_REDUCE_TPS:
            if all_reduce is None:
                raise ValueError(f"TP{ctx.tp} needs the all-reduce")
            op = standalone_dual_norm(constants)
        else:
            raise ValueError(f"no attention boundary at TP{ctx.tp}")
        return cls(op, all_reduce, weights)

    @classmethod
    def build_reduced(cls, ctx: Any, layer: Any) -> "AttentionBoundary":
        """The boundary after stock's whole o_proj, all-reduce included, at any tensor parallel size.

        Raises: as `build`, but for what concerns the all-reduce.
        """
        constants, weights = _read(ctx, layer)
        return cls(standalone_dual_norm(constants), None, weights)

    def prepare_kv(self) -> None:
        """Nothing: the boundary does not read the KV cache. Providers of the decode builder have this method."""

    def run(self, partial: torch.Tensor, stream: torch.Tensor, out: torch.Tensor) -> None:
        """partial [rows, 8192] BF16, this rank's; stream [rows, 8192] FP32, updated in place; out as partial.

        Raises:
            ValueError: naming the operand and what it must be.
        """
        if self.all_reduce is not None:
            partial = self.all_reduce(partial)
        self.op.run(partial, stream, self.post_weight, self.alpha, self.beta, self.next_weight, out)


def _read(ctx: Any, layer: Any) -> tuple[DualNormConstants, Weights]:
    """Constants and weights of a layer's attention boundary; refuses layers that have none. Raises: as `build`."""
    if layer is None:
        raise ValueError("the attention boundary needs a decoder layer")
    require_target_layer(layer, ctx.backbone)
    post, connection, pre = layer.post_attn_norm, layer.add_attn, layer.pre_ffn_norm
    constants = boundary_constants(post, connection, pre)
    if constants.hidden != H:
        raise ValueError(f"the attention boundary needs hidden size {H}, not {constants.hidden}")
    post_weight = post.weight if post.has_weight else None
    return constants, (post_weight, connection.alpha, connection.beta, pre.weight if pre.has_weight else None)


def fused_all_reduce(ctx: Any) -> AllReduceDualNorm:
    """The model's AllReduceDualNorm, with the mailbox that all its layers share; made on first use.

    Collective over the tensor parallel group then. It sums in the order of stock's all-reduce (`all_reduce_order`).

    Raises:
        ValueError: `ctx.group` is not a tensor parallel group of `ctx.tp` ranks, or no fused order is known there.
    """
    shared = _fused.get(ctx.backbone)
    if shared is None:
        group = ctx.group if find_tp_group is None else find_tp_group()
        device_group, cpu_group = (getattr(group, name, None) for name in ("device_group", "cpu_group"))
        known = device_group is not None and cpu_group is not None and ctx.group in (group, device_group)
        if not known or getattr(group, "world_size", ctx.tp) != ctx.tp:
            raise ValueError(f"the attention boundary takes the tensor parallel group of {ctx.tp} ranks")
        if ctx.tp not in FUSED_TPS or ctx.all_reduce_order is None:
            raise ValueError(f"TP{ctx.tp} has no fused all-reduce in the order of stock's")
        shared = AllReduceDualNorm(device_group, cpu_group, device=ctx.device, sum_order=ctx.all_reduce_order)
        _fused[ctx.backbone] = shared
        logger.info("attention boundary at TP%d: all-reduce fused, summing as %s", ctx.tp, ctx.all_reduce_order)
    return shared


def producer_mailbox(ctx: Any) -> LamportMailbox | None:
    """The fused boundary's mailbox where o_proj publishes its partial sum into it (TP8), else None.

    The one place that decides it, for the projection (which GEMM) and for the boundary (whether it publishes).

    Raises: as `fused_all_reduce`.
    """
    return fused_all_reduce(ctx).mailbox if ctx.tp in PACKAGE_GEMM_TPS else None
