"""What the builders of runtime objects are given, and which object serves which tensor parallel size."""

import dataclasses
from typing import Any

import torch

H = 8192
"""Muse Spark's hidden size: the width of every boundary."""
FUSED_TPS = (2, 4, 8)
"""Where the o_proj all-reduce is fused with the dual norm. The model is not served at TP2; it is the smallest run."""
ALL_REDUCE_TPS = (16,)
"""Where stock's own all-reduce runs before the standalone dual norm."""


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
