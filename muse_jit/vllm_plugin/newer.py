"""For a vLLM that has a specialised decode of its own for Muse Spark: the same objects, handed to its builder.

Expected of such a vLLM, as its documentation shows it:

- a package vllm.models.muse_spark.nvidia.specialized_decode with the modules cutedsl.boundary.layer_front
  (LayerFront) and cutedsl.oproj.batt (OProjection, AttentionBoundary, and the functions fused_all_reduce,
  producer_mailbox and standalone_dual_norm);
- its builder makes them by `LayerFront.build(ctx, layer, rows)`, `OProjection.build(ctx, layer, rows=)` and
  `AttentionBoundary.build(ctx, layer, all_reduce=)`, and calls `run` and `prepare_kv` on them, as ours are called;
- `ctx` has tp, group (the tensor parallel group, or its device group), device, backbone, aux_layers, all_reduce_order.

Each class is put in the place of vLLM's only if its constructors and methods take the same arguments, everywhere in
that package where the original is referred to. It must happen before the builder runs, that is before the weights are
loaded. One that differs stays vLLM's own, with one warning; the others go with it, since they share a mailbox.
"""

import importlib
import importlib.util
import inspect
import logging
import sys
from typing import Any

logger = logging.getLogger("vllm.muse_jit")

PACKAGE = "vllm.models.muse_spark.nvidia.specialized_decode"
METHODS = {
    "LayerFront": ("build", "warm_up", "run"),
    "OProjection": ("build", "run"),
    "AttentionBoundary": ("unsupported", "build", "prepare_kv", "run"),
}
WHERE = {
    "LayerFront": "cutedsl.boundary.layer_front",
    "OProjection": "cutedsl.oproj.batt",
    "AttentionBoundary": "cutedsl.oproj.batt",
    "fused_all_reduce": "cutedsl.oproj.batt",
    "producer_mailbox": "cutedsl.oproj.batt",
    "standalone_dual_norm": "cutedsl.oproj.batt",
}


def has_own_decode() -> bool:
    """Whether this vLLM has a specialised decode of its own for Muse Spark.

    Imports vLLM's model package (seconds), which a worker that is about to load the model needs anyway.
    """
    try:
        return importlib.util.find_spec(PACKAGE) is not None
    except ModuleNotFoundError:
        return False


def ours() -> dict[str, Any]:
    """What is handed over, by name."""
    from muse_jit.ops import attention_boundary, dual_norm, layer_front, o_projection

    return {
        "LayerFront": layer_front.LayerFront,
        "OProjection": o_projection.OProjection,
        "AttentionBoundary": attention_boundary.AttentionBoundary,
        "fused_all_reduce": attention_boundary.fused_all_reduce,
        "producer_mailbox": attention_boundary.producer_mailbox,
        "standalone_dual_norm": dual_norm.standalone_dual_norm,
    }


def hand_over() -> bool:
    """Put our objects in the place of vLLM's; says in one line whether it did.

    Raises:
        ImportError, AttributeError: the package is not as expected; nothing is replaced.
    """
    originals = {name: getattr(importlib.import_module(f"{PACKAGE}.{where}"), name) for name, where in WHERE.items()}
    if all(originals[name] is mine for name, mine in ours().items()):
        return True
    for name, methods in METHODS.items():
        for method in methods:
            theirs, mine = (_parameters(getattr(owner, method)) for owner in (originals[name], ours()[name]))
            if theirs != mine:
                logger.warning(
                    "muse_jit: vLLM keeps its own specialised decode: %s.%s takes %s there and %s here",
                    name, method, theirs, mine,
                )  # fmt: skip
                return False
    names_of = {id(original): name for name, original in originals.items()}
    replacements = ours()
    for module_name, module in list(sys.modules.items()):
        if module is not None and module_name.startswith(PACKAGE):
            for attribute, value in list(vars(module).items()):
                if id(value) in names_of:
                    setattr(module, attribute, replacements[names_of[id(value)]])
    _find_group()
    logger.info("muse_jit: vLLM's specialised decode is built from this package's runtime objects")
    return True


def _find_group() -> None:
    """Its builder may give the device group alone; the fused all-reduce needs the CPU group, too."""
    from vllm.distributed import get_tp_group

    from muse_jit.ops import attention_boundary

    attention_boundary.find_tp_group = get_tp_group


def _parameters(function: Any) -> list[str]:
    """Names of the parameters, and which are keyword-only."""
    parameters = inspect.signature(function).parameters.values()
    return [f"*{p.name}" if p.kind is inspect.Parameter.KEYWORD_ONLY else p.name for p in parameters]
