"""Whose order of operations stock's norms would have in this process: the installed Triton's or FlashInfer's."""

import functools
import importlib.metadata
import logging

from muse_jit.constants.row_norm import ORDERS
from muse_jit.plan import FLASHINFER_ARCHES, FLASHINFER_ORDER

logger = logging.getLogger("muse_jit")

NEWEST_ORDER = ORDERS[0]


@functools.cache
def stock_order() -> str:
    """The order of operations of the Triton that stock kernels would be compiled with in this process.

    An unknown version gets the nearest known one, and one log line saying that bits may differ.
    """
    version = _version("triton")
    if version is None:
        logger.info("Triton is not installed; norms sum in the order of %s", NEWEST_ORDER)
        return NEWEST_ORDER
    return order_of_triton(version)


@functools.cache
def stock_boundary_order(arch: str) -> str:
    """The order of stock's residual boundary on a GPU architecture: FlashInfer's where stock takes it from there.

    Stock asks FlashInfer first, on sm_100 and sm_103 only, and takes Triton where FlashInfer is older than the kernel
    or missing. A FlashInfer newer than the known one gets the known order, and one log line.
    """
    version = _version("flashinfer-python") if arch in FLASHINFER_ARCHES else None
    known = _release(FLASHINFER_ORDER.removeprefix("flashinfer-"))
    if version is None or _release(version) < known:
        return stock_order()
    if _release(version) != known:
        logger.info("the order of FlashInfer %s is not known; using %s, bits may differ", version, FLASHINFER_ORDER)
    return FLASHINFER_ORDER


def unknown_stock(arch: str, *, boundary: bool) -> str | None:
    """Why it is not known in which order stock's row norm, or residual boundary, sums here; None where it is.

    The kernels then have the nearest order, whose bits are equal or nearly so.
    """
    triton, flashinfer = _version("triton"), _version("flashinfer-python")
    if boundary and stock_boundary_order(arch) == FLASHINFER_ORDER:
        known = _release(FLASHINFER_ORDER.removeprefix("flashinfer-"))
        return None if _release(str(flashinfer)) == known else f"the order of FlashInfer {flashinfer} is not known"
    if triton is None:
        return "Triton is not installed"
    known_orders = {_release(order.removeprefix("triton-")) for order in ORDERS}
    return None if _release(triton) in known_orders else f"the order of Triton {triton} is not known"


def order_of_triton(version: str) -> str:
    """The order for a Triton version such as "3.8.0"; the nearest known one for others."""
    known = {order: _release(order.removeprefix("triton-")) for order in ORDERS}
    asked = _release(version)
    nearest = min(known, key=lambda order: (abs(known[order] - asked), -known[order]))
    if known[nearest] != asked:
        logger.info("the order of Triton %s is not known; norms sum as %s, bits may differ", version, nearest)
    return nearest


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _release(version: str) -> int:
    """Major and minor of a version as one number that orders and subtracts: "3.8.0+cu130" is 3008."""
    major, _, rest = version.partition(".")
    minor = rest.partition(".")[0]
    digits = "".join(c for c in minor if c.isdigit())
    return int(major) * 1000 + int(digits or 0)
