"""Names and signatures that the decode builder relies on."""

import inspect

import pytest

from muse_jit.ops import (
    all_reduce_dual_norm,
    attention_boundary,
    dual_norm,
    layer_front,
    o_projection,
    stock_layer,
    unpooler,
)

BOUNDARY, PROJECTION, FRONT = (
    attention_boundary.AttentionBoundary,
    o_projection.OProjection,
    layer_front.LayerFront,
)
NAMES = [
    (FRONT, ["norm", "*aux"]),
    (FRONT.build, ["ctx", "layer", "rows"]),
    (FRONT.warm_up, ["self", "device", "rows"]),
    (FRONT.run, ["self", "x", "stream", "out", "aux"]),
    (PROJECTION, ["weight", "rows", "mailbox"]),
    (PROJECTION.build, ["ctx", "layer", "*rows"]),
    (PROJECTION.run, ["self", "x", "out"]),
    (unpooler.Unpooler, ["weight", "mailbox", "shape", "rows"]),
    (unpooler.Unpooler.run, ["self", "x", "out"]),
    (BOUNDARY, ["op", "all_reduce", "weights"]),
    (BOUNDARY.unsupported, ["vllm_config"]),
    (BOUNDARY.build, ["ctx", "layer", "*all_reduce"]),
    (BOUNDARY.prepare_kv, ["self"]),
    (BOUNDARY.run, ["self", "partial", "stream", "out"]),
    (attention_boundary.fused_all_reduce, ["ctx"]),
    (attention_boundary.producer_mailbox, ["ctx"]),
    (dual_norm.standalone_dual_norm, ["constants"]),
    (all_reduce_dual_norm.AllReduceDualNorm, ["device_group", "cpu_group", "*device", "*sum_order"]),
    (all_reduce_dual_norm.AllReduceDualNorm.bind, ["self", "constants", "published"]),
    (
        all_reduce_dual_norm.FusedDualNorm.run,
        ["self", "partial", "stream", "post_weight", "alpha", "beta", "next_weight", "out"],
    ),
    (stock_layer.boundary_constants, ["post", "connection", "pre"]),
    (stock_layer.row_norm_constants, ["norm", "*enable_pdl", "*x_fp32", "*stream", "*aux", "*release_early"]),
]


@pytest.mark.parametrize(("function", "expected"), NAMES, ids=lambda value: getattr(value, "__qualname__", None))
def test_parameters(function, expected):
    """Those of the documented interface, in order; what this package adds comes after them and has defaults."""
    parameters = list(inspect.signature(function).parameters.values())
    names = [f"*{p.name}" if p.kind is p.KEYWORD_ONLY else p.name for p in parameters]
    assert names[: len(expected)] == expected
    assert all(p.default is not p.empty for p in parameters[len(expected) :])
