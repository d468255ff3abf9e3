"""The constant sets that GPU tests and benchmarks use: one list, so that a cache can be filled for them elsewhere.

python tests/gpu/cases.py CACHE_DIR      fills a cache for sm_90a, to be carried to the GPU machine
"""

import dataclasses
import itertools
import sys

from muse_jit.constants import gemm_shapes
from muse_jit.constants.all_reduce_dual_norm import AllReduceDualNormConstants
from muse_jit.constants.dual_norm import ORDERS, DualNormConstants
from muse_jit.constants.gemm_shapes import BUCKETS, default_shape, gemm_constants
from muse_jit.constants.mailbox import Shape
from muse_jit.constants.row_norm import RowNormConstants
from muse_jit.constants.small_m_gemm import GemmShape, SmallMGemmConstants
from muse_jit.plan import Deployment, attention_boundary

FRONT = RowNormConstants(
    hidden=8192, eps=1e-5, has_weight=True, gain_center=1.0, stream=True, enable_pdl=True, release_early=True
)
"""The first layer's norm, BF16 input: the set that is served."""


def front_sets():
    """What LayerFront needs: both inputs, with and without aux, both orders."""
    for x_fp32, aux, order in itertools.product((False, True), (False, True), ("triton-3.8", "triton-3.6")):
        yield dataclasses.replace(FRONT, x_fp32=x_fp32, aux=aux, order=order)


def row_norm_sets():
    """Every combination that a stock cubin exists for: input, output, weight; PDL on and off."""
    for x_fp32, out, place, pdl in itertools.product(
        (False, True), ("bf16", "fp32"), ("none", "after", "before"), (True, False)
    ):
        weight = place != "none"
        yield RowNormConstants(
            hidden=8192,
            eps=1e-5,
            has_weight=weight,
            weight_before_norm=place == "before",
            gain_center=1.0 if weight else 0.0,
            x_fp32=x_fp32,
            out_dtype=out,
            enable_pdl=pdl,
        )


def prepared_sets():
    """Sets that nothing else launches, for what the first launch in a process is about."""
    for n in range(3):
        yield RowNormConstants(hidden=2048 + 256 * n, eps=1e-5, has_weight=True, gain_center=1.0)


def other_widths():
    """Widths that need padding, and the widest."""
    for hidden in (8, 64, 1000, 4096, 7168, 16384):
        yield dataclasses.replace(FRONT, hidden=hidden)


BOUNDARIES = {
    "D1": DualNormConstants(8192, 1e-8, next_eps=1e-5, next_gain_center=1.0),
    "D2": DualNormConstants(8192, 1e-8, "before", 1.0, next_eps=1e-5, next_gain_center=1.0),
    "D3": DualNormConstants(8192, 1e-8, "before", 1.0, next_eps=1e-5),
}
"""Muse Spark's residual boundaries: attention, FFN, and the one before the final norm."""


def boundary_sets():
    """The boundaries with every spread of a row over CTAs, with and without PDL."""
    for base, ctas, pdl in itertools.product(
        BOUNDARIES.values(), (1, 2, 4, 8), ((True, False), (True, True), (False, False))
    ):
        yield dataclasses.replace(base, ctas_per_row=ctas, enable_pdl=pdl[0], release_early=pdl[1])


def dual_norm_sets(order):
    """Every combination of flags that the stock function accepts."""
    for post, following, gate, alpha_tensor, out in itertools.product(
        ("none", "after", "before"), ("none", "after", "before"), ("channel", "scalar"), (True, False), ("bf16", "fp32")
    ):
        yield DualNormConstants(
            8192,
            1e-8,
            post,
            1.0 if post != "none" else 0.0,
            gate,
            alpha_tensor,
            1.0 if alpha_tensor else 0.75,
            next_eps=1e-5,
            next_has_weight=following != "none",
            next_weight_before=following == "before",
            next_gain_center=1.0 if following != "none" else 0.0,
            out_dtype=out,
            order=order,
        )


def emulated_boundaries():
    """Boundaries whose order has no stock kernel on this architecture, or whose width stock's cubins lack."""
    for base in BOUNDARIES.values():
        yield dataclasses.replace(base, order="flashinfer-0.7")
        yield dataclasses.replace(base, hidden=4096)
        yield dataclasses.replace(base, hidden=1000, ctas_per_row=2)


FUSED_TIMEOUT_S, WATCHDOG_S = 5.0, 1.0
"""The watchdog's limit in tests, and in those in which a rank is missing."""
PROCESSES_TIMEOUT_S = 20.0
"""Where processes take turns on one GPU."""
BOUNDARY = attention_boundary(Deployment(), "sm_90a")
NO_PDL = dataclasses.replace(BOUNDARY, enable_pdl=False, release_early=False)


def fused(boundary, tp, sum_order, *, published, **fields):
    """A consumer, with the limit of tests unless said otherwise."""
    fields = {"timeout_s": FUSED_TIMEOUT_S, **fields}
    return AllReduceDualNormConstants.of(boundary, tp, sum_order, published=published, **fields)


def with_publisher(consumer):
    return consumer, dataclasses.replace(consumer, role="publish", wait_last=False)


def fused_sets():
    """What the tests of the fused all-reduce use, on one GPU and on several."""
    for tp, order in itertools.product((2, 4, 8, 16), ("mnnvl", "node-local")):
        yield from with_publisher(fused(BOUNDARY, tp, order, published=True))
        yield fused(BOUNDARY, tp, order, published=False)
        yield fused(NO_PDL, tp, order, published=False)
        yield fused(BOUNDARY, tp, order, published=True, wait_last=True)
    for boundary in BOUNDARIES.values():
        yield from with_publisher(fused(boundary, 2, "mnnvl", published=True))
        yield fused(boundary, 2, "mnnvl", published=False)
    for tp in (2, 4, 8):
        yield from with_publisher(fused(BOUNDARY, tp, "mnnvl", published=True, timeout_s=WATCHDOG_S))
        yield fused(BOUNDARY, tp, "mnnvl", published=False, timeout_s=WATCHDOG_S)
    for tp, published in itertools.product((2, 4, 8), (False, True)):
        yield fused(BOUNDARY, tp, "mnnvl", published=published, timeout_s=PROCESSES_TIMEOUT_S)
    # benchmarks/all_reduce.py: as they are served.
    for tp, order, published in itertools.product((2, 4, 8), ("mnnvl", "node-local"), (False, True)):
        served = AllReduceDualNormConstants.of(BOUNDARY, tp, order, published=published)
        yield from with_publisher(served) if published else (served,)
        if published:
            yield dataclasses.replace(served, wait_last=True)


CHAIN_NORM = dataclasses.replace(FRONT, hidden=1024)
"""A norm that feeds a GEMM, both launched dependently."""

GEMM_SIZES = ((8192, 2048), (8192, 1024), (8192, 512), (2048, 4096), (1024, 4096), (512, 4096))
"""[N, K] of the weights: o_proj at TP 4, 8 and 16, the unpooler's column shards at TP 4, 8 and 16."""

SMALL_GEMM_SIZES = ((16, 32), (48, 96), (8208, 160))
"""Few outputs, a short K, numbers of blocks and columns that are no powers of two."""

ARCH = "sm_90a"


def shipped_gemms():
    """What Muse Spark's sizes and whatever else the table holds are launched with on this architecture."""
    for n, k in GEMM_SIZES:
        yield from gemm_constants(n, k, BUCKETS, ARCH, pdl=True)
    for entry in gemm_shapes.table().values():
        if entry.arch == ARCH:
            yield from gemm_constants(entry.n, entry.k, [entry.rows], ARCH, pdl=True)


def default_gemms():
    """Untuned shapes, also of sizes that are tuned."""
    for (n, k), bucket in itertools.product(GEMM_SIZES + SMALL_GEMM_SIZES, BUCKETS):
        yield from gemm_constants(n, k, [bucket], ARCH, pdl=True, shape=default_shape(n, k, bucket, ARCH))


def other_gemms():
    """Without PDL, without early release, and shapes that neither the table nor the defaults have."""
    for constants in gemm_constants(8192, 1024, BUCKETS, ARCH, pdl=True):
        yield dataclasses.replace(constants, enable_pdl=False, release_early=False)
        yield dataclasses.replace(constants, release_early=False)
    for k, rows, shape in (
        (1024, 8, GemmShape(64, 16, 1)),
        (2048, 16, GemmShape(64, 8, 2)),
        (512, 64, GemmShape(32, 2, 2)),
        (1024, 32, GemmShape(16, 2, 1)),
        (1024, 24, GemmShape(128, 8, 1)),
        (1024, 64, GemmShape(64, 4, 1, 4, 6, 1, 1, 2, "wgmma")),
        (2048, 32, GemmShape(64, 4, 1, 2, 5, 1, 1, 4, "wgmma")),
        (2048, 48, GemmShape(128, 8, 1, 2, 5, 1, 2, 1, "wgmma")),
        (1024, 16, GemmShape(64, 8, 1, 2, 4, 1, 4, 1, "wgmma")),
        (1024, 32, GemmShape(128, 16, 1, 2, 4, 1, 1, 1, "wgmma")),
    ):
        yield SmallMGemmConstants(n=8192, k=k, rows=rows, **shape._asdict(), release_early=True)


def publishing_gemms():
    """o_proj into a mailbox, as served at TP8 and as it could be elsewhere, and every way to divide the work; and the
    same without one, to compare with."""
    for tp, mailbox in itertools.product((2, 4, 8), (True, False)):
        box = Shape(tp, 64, 8192) if mailbox else None
        yield from gemm_constants(8192, 8192 // tp, BUCKETS, ARCH, pdl=True, mailbox=box)
    for (rows, shape), box in itertools.product(PUBLISHING_SHAPES, (Shape(8, 64, 8192), None)):
        yield from gemm_constants(8192, 1024, [rows], ARCH, pdl=True, shape=shape, mailbox=box)


PUBLISHING_SHAPES = (
    (8, GemmShape(32, 4, 1)),
    (64, GemmShape(32, 4, 2, 2, 1, cluster_k=4)),
    (16, GemmShape(64, 8, 1, 2, 4, 1, 2, 1, "wgmma")),
    (64, GemmShape(64, 4, 1, 4, 6, 1, 1, 4, "wgmma")),
)


def gemm_sets():
    """All that publish nothing, each once."""
    return list(dict.fromkeys([*shipped_gemms(), *default_gemms(), *other_gemms()]))


def all_sets():
    """Everything above, each once."""
    duals = [
        *(dataclasses.replace(attention_boundary(Deployment(), "sm_90a"), order=order) for order in ORDERS),
        *boundary_sets(),
        *dual_norm_sets("triton-3.8"),
        *dual_norm_sets("triton-3.6"),
        *emulated_boundaries(),
        *fused_sets(),
        NO_PDL,
    ]
    norms = [*front_sets(), *row_norm_sets(), *other_widths(), *prepared_sets(), *duals, CHAIN_NORM]
    return list(dict.fromkeys([*norms, *gemm_sets(), *publishing_gemms()]))


def main():
    from muse_jit.plan import Plan, Planned
    from muse_jit.settings import Settings
    from muse_jit.warmup import warm_up

    plan = Plan(tuple(Planned(constants, "sm_90a") for constants in all_sets()))
    report = warm_up(plan, Settings.from_environ().with_options(cache_dir=sys.argv[1]))
    print({status: report.count(status) for status in ("hit", "compiled", "failed")})
    return 0 if report.complete else 1


if __name__ == "__main__":
    sys.exit(main())
