"""Constants read from a stock decoder layer, by attribute names.

Never by `isinstance`: vLLM renamed the norm class between releases and kept the attributes.
"""

import functools
import importlib.metadata
import logging
from typing import Any

from muse_jit.constants.row_norm import ORDERS, RowNormConstants

logger = logging.getLogger("muse_jit")

NEWEST_ORDER = ORDERS[0]


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
    if getattr(norm, "variance_size_override", None) is not None:
        raise ValueError(f"the row norm reduces over the full hidden size, not {norm.variance_size_override}")
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


@functools.cache
def stock_order() -> str:
    """The order of operations of the Triton that stock kernels would be compiled with in this process.

    An unknown version gets the nearest known one, and one log line saying that bits may differ.
    """
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        logger.info("Triton is not installed; norms sum in the order of %s", NEWEST_ORDER)
        return NEWEST_ORDER
    return order_of_triton(version)


def order_of_triton(version: str) -> str:
    """The order for a Triton version such as "3.8.0"; the nearest known one for others."""
    known = {order: _release(order.removeprefix("triton-")) for order in ORDERS}
    asked = _release(version)
    nearest = min(known, key=lambda order: (abs(known[order] - asked), -known[order]))
    if known[nearest] != asked:
        logger.info("the order of Triton %s is not known; norms sum as %s, bits may differ", version, nearest)
    return nearest


def _release(version: str) -> int:
    """Major and minor of a version as one number that orders and subtracts: "3.8.0+cu130" is 3008."""
    major, _, rest = version.partition(".")
    minor = rest.partition(".")[0]
    digits = "".join(c for c in minor if c.isdigit())
    return int(major) * 1000 + int(digits or 0)


def _weight_dtype(weight: Any) -> str:
    name = str(weight.dtype).removeprefix("torch.")
    return {"bfloat16": "bf16", "float32": "fp32"}.get(name, name)
