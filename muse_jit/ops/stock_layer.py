"""Constants read from a stock decoder layer, by attribute names.

Never by `isinstance`: vLLM renamed the norm class between releases and kept the attributes.
"""

from typing import Any

import torch

from muse_jit.constants.dual_norm import DualNormConstants
from muse_jit.constants.row_norm import RowNormConstants
from muse_jit.key.target import arch_of_capability
from muse_jit.ops.device import pdl_supported
from muse_jit.ops.stock_order import stock_boundary_order, stock_order


def row_norm_constants(
    norm: Any,
    *,
    enable_pdl: bool,
    x_fp32: bool,
    stream: bool = False,
    aux: bool = False,
    release_early: bool = False,
    order: str | None = None,
) -> RowNormConstants:
    """The constants of a stock norm's fused-kernel path.

    Read are hidden_size, variance_epsilon, variance_size_override, has_weight, weight, fused_gain_center and
    applies_weight_before_norm; `fused_gain_center` and not `gain_center`, which is 1.0 on norms without weight too.
    `release_early` needs PDL and is off without it. `order`: default, what stock would run in this process.

    Raises:
        ValueError: the norm reduces over another size than its hidden size.
        ConstantsError: no kernel is possible for it.
    """
    _require_whole_row(norm, "the row norm")
    has_weight = bool(norm.has_weight)
    return RowNormConstants(
        hidden=int(norm.hidden_size),
        eps=float(norm.variance_epsilon),
        has_weight=has_weight,
        weight_dtype=_weight_dtype(norm.weight) if has_weight else "bf16",
        weight_before_norm=has_weight and bool(norm.applies_weight_before_norm),
        gain_center=float(norm.fused_gain_center) if has_weight else 0.0,
        x_fp32=x_fp32,
        stream=stream,
        aux=aux,
        enable_pdl=enable_pdl,
        release_early=release_early and enable_pdl,
        order=stock_order() if order is None else order,
    )


def boundary_constants(
    post: Any, connection: Any, pre: Any, *, enable_pdl: bool | None = None, order: str | None = None
) -> DualNormConstants:
    """The constants of a residual boundary: stock's post-norm, gated connection and next pre-norm.

    Of the norms the attributes of `row_norm_constants` are read, of the connection `alpha` (FP32 [hidden] or [1], or
    a number) and `beta` (FP32 [hidden] or [1]), which stock makes at the end of loading weights. `enable_pdl`:
    default, where the gates' device has it (True without a device). `order`: default, what stock would run there.

    Raises:
        ValueError: a norm reduces over another size than its hidden size, the two differ in size, a weight is not
            BF16, or the connection has no gates, or gates of another shape.
        ConstantsError: no kernel is possible for it.
    """
    for norm in (post, pre):
        _require_whole_row(norm, "the dual norm")
        if norm.has_weight and _weight_dtype(norm.weight) != "bf16":
            raise ValueError(f"the dual norm takes BF16 weights, not {_weight_dtype(norm.weight)}")
    hidden = int(pre.hidden_size)
    if int(post.hidden_size) != hidden:
        raise ValueError(f"the post-norm has {int(post.hidden_size)} columns and the next norm {hidden}")
    alpha, beta = getattr(connection, "alpha", None), getattr(connection, "beta", None)
    if alpha is None or not isinstance(beta, torch.Tensor):
        raise ValueError("the residual connection has no gates alpha and beta (are the weights loaded?)")
    if beta.numel() not in (1, hidden) or (isinstance(alpha, torch.Tensor) and alpha.shape != beta.shape):
        raise ValueError(f"the residual gates must have 1 or {hidden} elements both, beta has {beta.numel()}")
    if enable_pdl is None:
        enable_pdl = pdl_supported(beta.device) if beta.is_cuda else True
    if order is None:
        order = stock_boundary_order(_arch(beta.device)) if beta.is_cuda else stock_order()
    has_post, has_next = bool(post.has_weight), bool(pre.has_weight)
    return DualNormConstants(
        hidden=hidden,
        post_eps=float(post.variance_epsilon),
        post_weight=("before" if post.applies_weight_before_norm else "after") if has_post else "none",
        post_gain_center=float(post.fused_gain_center) if has_post else 0.0,
        gate="channel" if beta.numel() == hidden else "scalar",
        alpha_tensor=isinstance(alpha, torch.Tensor),
        alpha=1.0 if isinstance(alpha, torch.Tensor) else float(alpha),
        next_eps=float(pre.variance_epsilon),
        next_has_weight=has_next,
        next_weight_before=has_next and bool(pre.applies_weight_before_norm),
        next_gain_center=float(pre.fused_gain_center) if has_next else 0.0,
        enable_pdl=enable_pdl,
        release_early=enable_pdl,
        order=order,
    )


def require_target_layer(layer: Any, backbone: Any) -> None:
    """Refuse a layer that is not one of the backbone's, or whose stream is not FP32: a draft model's layers.

    They have the same attributes, and their stock forward rounds where the target's does not.

    Raises:
        ValueError: saying which.
    """
    layers = getattr(backbone, "layers", None)
    if layers is not None and not any(one is layer for one in layers):
        raise ValueError("the layer is not one of the target model's (a draft model's forward is another)")
    dtype = getattr(layer, "residual_dtype", torch.float32)
    if dtype != torch.float32:
        raise ValueError(f"the residual stream must be torch.float32, not {dtype}")


def _require_whole_row(norm: Any, what: str) -> None:
    override = getattr(norm, "variance_size_override", None)
    if override is not None:
        raise ValueError(f"{what} reduces over the full hidden size, not {override}")


def _arch(device: torch.device) -> str:
    return arch_of_capability(torch.cuda.get_device_capability(device))


def _weight_dtype(weight: Any) -> str:
    name = str(weight.dtype).removeprefix("torch.")
    return {"bfloat16": "bf16", "float32": "fp32"}.get(name, name)
