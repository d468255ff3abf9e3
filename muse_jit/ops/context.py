"""What the builders of runtime objects are given, and which object serves which tensor parallel size."""

import dataclasses
import importlib
import importlib.util
import types
from typing import Any

import torch

from muse_jit.errors import NotAvailable

H = 8192
"""Muse Spark's hidden size: the width of every boundary."""
FUSED_TPS = (2, 4, 8)
"""Where the o_proj all-reduce is fused with the dual norm. The model is not served at TP2; it is the smallest run."""
ALL_REDUCE_TPS = (16,)
"""Where stock's own all-reduce runs before the standalone dual norm."""

FUSED_MODULE = "muse_jit.ops.all_reduce_dual_norm"
GEMM_MODULE = "muse_jit.ops.unpooler"
_WHAT = {FUSED_MODULE: "the all-reduce fused with the dual norm", GEMM_MODULE: "the publishing GEMM"}


@dataclasses.dataclass(frozen=True)
class BuildContext:
    """What the runtime objects of one model on one rank have in common. Any object with these attributes will do."""

    tp: int
    """Tensor parallel size."""
    group: Any
    """The tensor parallel group, with attributes `device_group` and `cpu_group`."""
    device: torch.device
    backbone: Any
    """The model that has the decoder layers, `layers`; what is shared between them is kept for it."""
    all_reduce_order: str | None = None
    """"mnnvl" or "node-local": the order in which stock's all-reduce sums here; None where it is none of these."""
    aux_layers: tuple[int, ...] = ()
    """Layers before which the residual stream is tapped for a draft model."""


def missing(module: str) -> str | None:
    """Why an object of this package that is made by `module` cannot be had; None where it can."""
    there = importlib.util.find_spec(module) is not None
    if there and module == GEMM_MODULE:
        there = importlib.import_module(module).PUBLISHES
    return None if there else f"{_WHAT[module]} is not available in this version"


def require(module: str) -> types.ModuleType:
    """The module that makes an object of this package.

    Raises:
        NotAvailable: this version does not have it; says what.
    """
    why = missing(module)
    if why is not None:
        raise NotAvailable(why)
    return importlib.import_module(module)
