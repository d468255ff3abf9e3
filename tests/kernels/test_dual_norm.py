"""The dual norm as compiled: its PTX, run on numpy arrays, gives the bits that stock's order of operations gives.

Nothing here needs a GPU. What the assembler makes of the PTX is looked at in the cubin: it must not have fused or
unfused anything, nor spilled.
"""

import collections
import dataclasses
import functools
import itertools
import pathlib
import re
import tempfile
from typing import Any

import numpy as np
import pytest
from oracle import dual, fp32, ptx
from oracle.dual_rows import rows_for, sparse_rows, vector_for
from oracle.sass import instruction_counts, local_bytes, needs_nvdisasm, registers

from muse_jit.constants.dual_norm import DualNormConstants
from muse_jit.kernels import dual_norm

ARCHS = ("sm_90a", "sm_100a", "sm_103a", "sm_120a")
D1 = DualNormConstants(8192, 1e-8, next_eps=1e-5, next_gain_center=1.0)
D2 = DualNormConstants(8192, 1e-8, "before", 1.0, next_eps=1e-5, next_gain_center=1.0)
D3 = DualNormConstants(8192, 1e-8, "before", 1.0, next_eps=1e-5)
BARE = DualNormConstants(8192, 1e-8, next_eps=1e-5, next_has_weight=False)


@dataclasses.dataclass(frozen=True)
class Target:
    arch: str


def change(base: DualNormConstants, **fields: Any) -> DualNormConstants:
    return dataclasses.replace(base, **fields)


NUMBER = {"alpha_tensor": False, "alpha": 0.7}
# What the serving plan holds and every split of a row, on every architecture; then each flag, where its code differs.
CASES = [
    *[(arch, c) for arch in ARCHS for c in (D1, D2, D3)],
    *[(arch, change(D1, ctas_per_row=n)) for arch in ARCHS for n in (1, 2, 4)],
    *[(arch, change(c, order="flashinfer-0.7")) for arch in ARCHS for c in (D1, D2)],
    *[(arch, change(D1, order="triton-3.6", release_early=True)) for arch in ARCHS],
    ("sm_100a", change(D3, order="flashinfer-0.7", ctas_per_row=1, **NUMBER)),
    ("sm_103a", change(D1, order="flashinfer-0.7", alpha_tensor=False)),
    ("sm_90a", change(D1, gate="scalar", enable_pdl=False)),
    ("sm_100a", change(D2, gate="scalar", ctas_per_row=4)),
    ("sm_90a", change(D2, post_weight="after", release_early=True, ctas_per_row=2)),
    ("sm_100a", change(D3, post_weight="after", out_dtype="fp32", enable_pdl=False, ctas_per_row=1)),
    ("sm_90a", change(D1, next_weight_before=True, out_dtype="fp32", **NUMBER)),
    ("sm_100a", change(D1, next_weight_before=True)),
    ("sm_103a", change(D2, next_weight_before=True, next_gain_center=-0.5, gate="scalar", **NUMBER)),
    ("sm_100a", change(BARE, post_weight="before", alpha_tensor=False)),
    ("sm_120a", change(BARE, post_weight="after", post_gain_center=1.0, gate="scalar", alpha_tensor=False)),
    ("sm_90a", change(BARE, out_dtype="fp32", gate="scalar")),
    ("sm_90a", change(D2, out_dtype="fp32")),
    ("sm_120a", change(D1, out_dtype="fp32", hidden=5000, ctas_per_row=2)),
    ("sm_100a", change(D2, order="triton-3.6", **NUMBER)),
    ("sm_100a", change(BARE, order="triton-3.6", out_dtype="fp32", ctas_per_row=2)),
    ("sm_90a", change(D1, hidden=8, ctas_per_row=1)),
    ("sm_100a", change(D2, hidden=1000, ctas_per_row=4)),
    ("sm_90a", change(D1, hidden=1032, gate="scalar", ctas_per_row=8)),
    ("sm_90a", change(D2, hidden=4096, ctas_per_row=8)),
    ("sm_120a", change(D2, hidden=7176, out_dtype="fp32", next_weight_before=True, ctas_per_row=1)),
]


def name_of(case: Any) -> str:
    if isinstance(case, str):
        return case
    differing = {k: v for k, v in case.as_dict().items() if v != D1.as_dict()[k]}
    return ",".join(f"{k}={v}" for k, v in differing.items()) or "D1"


each_case = pytest.mark.parametrize(("arch", "constants"), CASES, ids=name_of)


def kernels(arch: str, c: DualNormConstants) -> dict[bool, ptx.Kernel]:
    """The kernels of a compiled set: whether a CTA adds up its own warps before it tells the others."""
    found = [ptx.Kernel(text, cluster=c.ctas_per_row) for text in ptx.entries(compiled(arch, c)[0])]
    if c.ctas_per_row == 1:
        (only,) = found
        return {False: only}
    direct, by_cta = sorted(found, key=expected_bytes, reverse=True)
    return {False: direct, True: by_cta}


def expected_bytes(kernel: ptx.Kernel) -> int:
    """What the first mbarrier expects: four bytes a message."""
    arrival = next(i for i in kernel.instructions() if i.startswith("mbarrier.arrive.expect_tx"))
    return int(arrival.rpartition(",")[2])


each_kernel = pytest.mark.parametrize(
    ("arch", "constants", "by_cta"),
    [(arch, c, by_cta) for arch, c in CASES for by_cta in ((False, True) if c.ctas_per_row > 1 else (False,))],
    ids=lambda value: ("by CTA" if value else "direct") if isinstance(value, bool) else name_of(value),
)


@each_case
def test_messages(arch: str, constants: DualNormConstants) -> None:
    c = constants
    if c.ctas_per_row > 1:
        wanted = {False: 4 * c.row_threads // 32, True: 4 * c.ctas_per_row}
        assert {by_cta: expected_bytes(kernel) for by_cta, kernel in kernels(arch, c).items()} == wanted


@functools.cache
def compiled(arch: str, constants: DualNormConstants) -> tuple[str, bytes]:
    """(PTX, cubin)."""
    with tempfile.TemporaryDirectory() as folder:
        artifacts = dual_norm.build(constants, Target(arch), dump_dir=pathlib.Path(folder)).artifacts
        return artifacts.PTX, bytes(artifacts.CUBIN)


@dataclasses.dataclass
class Operands:
    """As FP32 values; those that a constant set does not have are None."""

    partial: np.ndarray
    stream: np.ndarray
    post_weight: np.ndarray | None
    alpha: np.ndarray | None
    beta: np.ndarray
    next_weight: np.ndarray | None


def operands_for(c: DualNormConstants) -> Operands:
    size = c.hidden if c.gate == "channel" else 1
    return Operands(
        fp32.round_bf16(rows_for(c.hidden, 1, 0)),
        rows_for(c.hidden, 2, 6),
        fp32.round_bf16(vector_for(c.hidden, 3, -2, 2)) if c.post_weight != "none" else None,
        vector_for(size, 4, 0.03, 1) if c.alpha_tensor else None,
        vector_for(size, 5, 0, 1),
        fp32.round_bf16(vector_for(c.hidden, 6, -2, 2)) if c.next_has_weight else None,
    )


class Spy:
    """The rsqrt of both sides. Its operands are compared too: a wrong sum often vanishes in a rounded output."""

    def __init__(self) -> None:
        self.operands: list[np.ndarray] = []

    def __call__(self, a: np.ndarray) -> np.ndarray:
        self.operands.append(np.array(a))
        return fp32.rsqrt(a)


def run(kernel: ptx.Kernel, c: DualNormConstants, operands: Operands, spy: Spy) -> list[np.ndarray]:
    """[stream, out] as FP32, from running the PTX with an output filled with a poison value."""
    stream = operands.stream.copy()
    out = np.full(stream.shape, 7, np.float32 if c.out_dtype == "fp32" else np.uint16)
    weights = [None if w is None else fp32.to_bf16(w) for w in (operands.post_weight, operands.next_weight)]
    arguments = [fp32.to_bf16(operands.partial), stream, weights[0], operands.alpha, operands.beta, weights[1], out]
    assert kernel.threads == c.threads_per_cta
    ptx.run(kernel, [a for a in arguments if a is not None], stream.shape[0] * c.ctas_per_row, spy)
    return [stream, out if out.dtype == np.float32 else fp32.from_bf16(out)]


@each_kernel
def test_bits(arch: str, constants: DualNormConstants, by_cta: bool) -> None:
    operands, spy, expected_spy = operands_for(constants), Spy(), Spy()
    got = run(kernels(arch, constants)[by_cta], constants, operands, spy)
    fields = [getattr(operands, field.name) for field in dataclasses.fields(operands)]
    expected = dual.dual_norm(*fields, constants, arch, expected_spy)
    assert len(spy.operands) == len(expected_spy.operands) == 2
    for means, wanted in zip(spy.operands, expected_spy.operands, strict=True):
        rows = means.reshape(len(wanted), -1)
        assert fp32.differing(rows, np.broadcast_to(wanted[:, None], rows.shape)) == 0
    assert [fp32.differing(g, e) for g, e in zip(got, expected, strict=True)] == [0, 0]


def test_orders_are_told_apart() -> None:
    """The rows above are rows in which every other order gives other sums, so the comparison means something."""
    rows = sparse_rows(8192, 1)
    for x, same in ((rows, ()), (fp32.round_bf16(rows), ("RF", "COMI"))):
        sums = {letter: dual.row_sum(x, letter) for letter in dual.ORDERS}
        for a, b in itertools.combinations(sums, 2):
            assert (fp32.differing(sums[a], sums[b]) > 0) != any(a in group and b in group for group in same)
    # The order of lanes and of warps shows, too: another one changes the sum.
    other = np.arange(32).reshape(2, 16).T.reshape(-1)
    by_lane = rows[10:13].reshape(3, 32, 32, 8)[:, :, other].reshape(3, -1)
    by_warp = rows[13:16].reshape(3, 32, 256)[:, other].reshape(3, -1)
    assert fp32.differing(dual.row_sum(rows[10:13], "P"), dual.row_sum(by_lane, "P")) > 0
    assert fp32.differing(dual.row_sum(rows[13:16], "P"), dual.row_sum(by_warp, "P")) > 0


def every_flag() -> list[DualNormConstants]:
    """Every combination of flags that stock's Triton kernel has."""
    sets = []
    for post, following, gate, tensor, out, order in itertools.product(
        ("none", "before", "after"), ("none", "before", "after"), ("channel", "scalar"), (True, False),
        ("bf16", "fp32"), ("triton-3.8", "triton-3.6"),
    ):  # fmt: skip
        flags: dict[str, Any] = {"next_has_weight": following != "none", "next_weight_before": following == "before"}
        sets.append(change(BARE, post_weight=post, gate=gate, alpha_tensor=tensor, out_dtype=out, order=order, **flags))
    return sets


@pytest.mark.parametrize("arch", ARCHS)
def test_the_order_of_every_combination(arch: str) -> None:
    names = {"P": "pairwise", "R": "two_lanes", "F": "two_lanes_fused", "C": "chain", "O": "chain_rounding_odd",
             "M": "chain_rounding_middle"}  # fmt: skip
    for c in every_flag():
        assert dual_norm._orders(c, arch) == tuple(names[letter] for letter in dual.letters(c, arch)), name_of(c)


@each_kernel
def test_instructions(arch: str, constants: DualNormConstants, by_cta: bool) -> None:
    c, kernel = constants, kernels(arch, constants)[by_cta]
    counts = collections.Counter(kernel.opcodes())
    assert counts["rsqrt.approx.ftz.f32"] == 2
    arithmetic = {op for op in counts if re.match(r"(add|sub|mul|mad|fma|div|neg)\.(.*\.)?f(16|32|64)", op)}
    assert all(re.fullmatch(r"(add|mul|fma)\.rn\.f32(x2)?", op) for op in arithmetic), arithmetic
    scalars = (1 + c.alpha_tensor) * (c.gate == "scalar")
    assert counts["ld.global.b32"] == scalars
    # With the halves of the row apart, BF16 comes in twice 8 bytes.
    weights = (c.post_weight != "none") + c.next_has_weight
    assert counts["ld.global.v2.b32"] == 2 * (weights + 1) * halves(c)
    first_sum = (1 + (c.post_weight != "none")) * halves(c)
    assert counts["ld.global.v4.b32"] == vectors(c) - scalars + 3 + first_sum - (weights + 1) * halves(c)
    assert counts["st.global.v4.b32"] == 2 + (1 if c.out_dtype == "bf16" else 2)
    known = {"ld.param.b64", "ld.global.b32", "ld.global.v2.b32", "ld.global.v4.b32"}
    known |= {"st.global.v4.b32", "st.shared.b32", "ld.shared.v2.b32", "ld.shared.v4.b32"}
    trades = 0 if halves(c) or c.hidden % 16 else 12 * (1 + (c.out_dtype == "fp32"))
    predicated = c.hidden & (c.hidden - 1) != 0 or c.hidden < 256
    assert counts["selp.b32"] == trades or (predicated and counts["selp.b32"] > trades)
    known |= {"st.async.shared::cluster.mbarrier::complete_tx::bytes.b32"}
    assert {op for op in counts if op.startswith(("ld.", "st."))} <= known
    predicates = sum(n for op, n in counts.items() if op.startswith("setp"))
    assert (predicates - trades > (3 if c.ctas_per_row > 1 else 0)) == predicated


@each_kernel
def test_exchanges(arch: str, constants: DualNormConstants, by_cta: bool) -> None:
    """Two exchanges: a barrier each within one CTA; in a cluster one barrier at the start and none afterwards."""
    c = constants
    opcodes = kernels(arch, c)[by_cta].opcodes()
    counts = collections.Counter(opcodes)
    cluster = c.ctas_per_row > 1
    warps = c.row_threads // 32
    local = by_cta and warps > c.ctas_per_row
    assert counts["bar.sync"] + counts["barrier.sync"] == (2 if local or not (cluster or warps == 1) else 0)
    assert counts["st.async.shared::cluster.mbarrier::complete_tx::bytes.b32"] == 2 * cluster
    assert counts["mbarrier.try_wait.parity.shared::cta.b64"] == 2 * cluster
    joins = [i for i, op in enumerate(opcodes) if op.startswith("barrier.cluster.wait")]
    assert len(joins) == cluster
    assert counts["barrier.cluster.arrive.relaxed.aligned"] == cluster
    # A butterfly over a warp, what eight neighbouring warps leave of the second one, and lanes that trade halves of
    # their sectors of the stream (and of an FP32 output).
    rest = 0 if by_cta else (warps // min(warps, 8)).bit_length() - 1
    trades = 0 if halves(c) or c.hidden % 16 else 4 * (1 + (c.out_dtype == "fp32"))
    assert counts["shfl.sync.bfly.b32"] == 2 * (5 + rest) + trades
    if cluster:
        last_load = max(i for i, op in enumerate(opcodes) if op.startswith("ld.global"))
        assert last_load < joins[0] < opcodes.index("shfl.sync.bfly.b32")


def halves(c: DualNormConstants) -> bool:
    """Whether a thread owns four columns of each half of the row, so that the first sum has loads of its own."""
    return c.out_dtype == "fp32" and not c.next_weight_before


def vectors(c: DualNormConstants) -> int:
    """Loads of what does not come from the previous grid: 16 bytes of BF16, twice 16 of FP32, or one element."""
    gate = 2 if c.gate == "channel" else 1
    return (c.post_weight != "none") + gate * (1 + c.alpha_tensor) + c.next_has_weight


@each_kernel
def test_waiting(arch: str, constants: DualNormConstants, by_cta: bool) -> None:
    """Weights and gates are loaded before the wait, partial and stream after it; a release follows the wait at once."""
    c, opcodes = constants, kernels(arch, constants)[by_cta].opcodes()
    loads = [i for i, op in enumerate(opcodes) if op.startswith("ld.global")]
    waits = [i for i, op in enumerate(opcodes) if op == "griddepcontrol.wait"]
    releases = [i for i, op in enumerate(opcodes) if op == "griddepcontrol.launch_dependents"]
    assert len(waits) == c.enable_pdl
    assert releases == ([waits[0] + 1] if c.release_early else [])
    if c.enable_pdl:
        weights = 2 * (c.post_weight != "none") + c.next_has_weight
        assert sum(i < waits[0] for i in loads) == vectors(c) + weights * halves(c)
        assert all(i > waits[0] for i, op in enumerate(opcodes) if op.startswith("st."))
    first_use = next(i for i, op in enumerate(opcodes) if op.startswith(("mul.rn", "fma.rn", "add.rn", "st.")))
    assert max(loads) < first_use


@each_case
def test_no_spills(arch: str, constants: DualNormConstants) -> None:
    _, cubin = compiled(arch, constants)
    assert set(local_bytes(cubin)) == {0}
    assert all(0 < count <= 64 for count in registers(cubin))


@needs_nvdisasm
@each_case
def test_the_assembler_changed_nothing(arch: str, constants: DualNormConstants) -> None:
    """As many roundings of each kind in the machine code as in the PTX, so nothing was fused or split."""
    text, cubin = compiled(arch, constants)
    machine = instruction_counts(cubin)
    assert machine["LDL"] == machine["STL"] == 0
    entries = [collections.Counter(ptx.Kernel(entry).opcodes()) for entry in ptx.entries(text)]
    written = sum(entries, collections.Counter())
    for word, name in (("mul", "FMUL"), ("add", "FADD"), ("fma", "FFMA")):
        for suffix, lanes in (("f32", ""), ("f32x2", "2")):
            assert machine[name + lanes] == written[f"{word}.rn.{suffix}"]
    assert machine["MUFU"] == 2 * len(entries)
