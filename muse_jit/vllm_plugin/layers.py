"""The constant sets that the layers of a loaded model need, read from the layers themselves."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from muse_jit.constants.base import ConstantSet
from muse_jit.constants.dual_norm import DualNormConstants
from muse_jit.constants.row_norm import RowNormConstants
from muse_jit.ops.stock_layer import boundary_constants, require_target_layer, row_norm_constants

FRONT = "the first layer's norm"


@dataclasses.dataclass(frozen=True)
class Learned:
    """What a model's layers need: constants as found, and why a part of it is left to stock."""

    front: tuple[RowNormConstants, ...] = ()
    """For BF16 and for FP32 embeddings; none where the first layer's norm is left to stock."""
    boundaries: dict[int, DualNormConstants] = dataclasses.field(default_factory=dict)
    """By the layer's number."""
    refused: dict[str, str] = dataclasses.field(default_factory=dict)
    """What is left to stock ("the first layer's norm", "layer 3") and the reason."""

    @property
    def constants(self) -> tuple[ConstantSet, ...]:
        """Every constant set once, in a fixed order, the same on every rank."""
        return tuple(dict.fromkeys([*self.front, *self.boundaries.values()]))

    def without(self, failed: Mapping[ConstantSet, str]) -> "Learned":
        """What is left where some kernels cannot be had, for the reasons given."""
        refused = dict(self.refused)
        for constants in self.front:
            if constants in failed:
                refused[FRONT] = failed[constants]
        refused |= {f"layer {i}": failed[c] for i, c in self.boundaries.items() if c in failed}
        return Learned(
            () if any(c in failed for c in self.front) else self.front,
            {i: c for i, c in self.boundaries.items() if c not in failed},
            refused,
        )


def backbone_of(model: Any) -> Any:
    """The part of a Muse Spark model that has the decoder layers.

    Raises:
        ValueError: there is none where it is expected.
    """
    if hasattr(model, "get_language_model"):
        model = model.get_language_model()
    backbone = getattr(model, "model", None)
    if not hasattr(backbone, "layers") or not hasattr(backbone, "start_layer"):
        raise ValueError(f"{type(model).__name__} has no model.layers")
    return backbone


def own_layers(backbone: Any) -> list[Any]:
    """The decoder layers that this rank has."""
    return list(backbone.layers)[backbone.start_layer : backbone.end_layer]


def learn(
    backbone: Any, *, enable_pdl: bool, norm_order: str | None = None, boundary_order: str | None = None
) -> Learned:
    """Read the constants of every layer; what cannot be served is refused with the reason, and the rest goes on.

    The orders are those of `stock_order` unless given.

    Raises:
        ValueError: the stream is spread over the ranks (sequence parallelism), or the model is compiled as a whole,
            which leaves no calls to replace.
    """
    if not getattr(backbone, "do_not_compile", True):
        raise ValueError("the model is compiled by torch.compile")
    if getattr(backbone, "is_sequence_parallel", False):
        raise ValueError("the residual stream is spread over the ranks (sequence parallelism)")
    learned = Learned()
    front: tuple[RowNormConstants, ...] = ()
    layers = own_layers(backbone)
    try:
        if backbone.start_layer != 0 or 0 in tuple(getattr(backbone, "aux_hidden_state_layers", ())):
            raise ValueError("it is on another rank, or a draft model taps the stream before it")
        norm = layers[0].self_attn.pre_qkv_proj_norm
        front = tuple(
            row_norm_constants(
                norm,
                enable_pdl=enable_pdl,
                x_fp32=dtype == torch.float32,
                stream=True,
                release_early=True,
                order=norm_order,
            )
            for dtype in (torch.bfloat16, torch.float32)
        )
    except (AttributeError, IndexError, ValueError) as error:
        learned.refused[FRONT] = str(error)
    for index, layer in enumerate(layers, start=backbone.start_layer):
        try:
            require_target_layer(layer, backbone)
            learned.boundaries[index] = boundary_constants(
                layer.post_attn_norm,
                layer.add_attn,
                layer.pre_ffn_norm,
                enable_pdl=enable_pdl,
                order=boundary_order,
            )
        except (AttributeError, ValueError) as error:
            learned.refused[f"layer {index}"] = str(error)
    return dataclasses.replace(learned, front=front)
