"""The fused all-reduce as compiled: its PTX, run on numpy arrays as one rank among others, and its machine code.

Nothing here needs a GPU. One rank is run at a time; what the others have published lies in its mailbox already.
"""

import collections
import dataclasses
import functools
import pathlib
import re
import tempfile
from typing import Any

import numpy as np
import pytest
from oracle import all_reduce, dual, fp32, ptx
from oracle.dual_rows import rows_for, vector_for
from oracle.sass import instruction_counts, local_bytes, needs_nvdisasm, registers

from muse_jit.constants.all_reduce_dual_norm import AllReduceDualNormConstants
from muse_jit.constants.dual_norm import DualNormConstants
from muse_jit.constants.mailbox import FAILED, Missing, missing_of
from muse_jit.kernels import all_reduce_dual_norm

ARCHS = ("sm_90a", "sm_100a", "sm_103a", "sm_120a")
D1 = DualNormConstants(8192, 1e-8, next_eps=1e-5, next_gain_center=1.0, release_early=True)
D2 = DualNormConstants(8192, 1e-8, "before", 1.0, next_eps=1e-5, next_gain_center=1.0)
CHOSEN = [0, 5, 10, 13, 16, 17, 21, 24, 27, 28, 29, 30]
"""Rows of `rows_for`: some of each kind."""
CAPACITY = len(CHOSEN) + 1


@dataclasses.dataclass(frozen=True)
class Target:
    arch: str


def fused(boundary: DualNormConstants, tp: int, sum_order: str = "mnnvl", **fields: Any) -> AllReduceDualNormConstants:
    base = AllReduceDualNormConstants.of(boundary, tp, sum_order, published=False, capacity=CAPACITY)
    return dataclasses.replace(base, **fields)


def change(base: DualNormConstants, **fields: Any) -> DualNormConstants:
    return dataclasses.replace(base, **fields)


FLASHINFER = change(D1, order="flashinfer-0.7")
CONSUME = {"role": "consume"}
CASES = [
    *[(arch, fused(D1, tp)) for arch in ARCHS for tp in (2, 8)],
    *[("sm_90a", fused(D1, tp)) for tp in (4, 16)],
    *[("sm_100a", fused(FLASHINFER, tp)) for tp in (4, 16)],
    *[(arch, fused(D1, 4, "node-local")) for arch in ARCHS],
    *[("sm_90a", fused(D1, tp, "node-local")) for tp in (2, 8)],
    *[(arch, fused(D1, 8, **CONSUME)) for arch in ARCHS],
    ("sm_90a", fused(D1, 2, **CONSUME, wait_last=True)),
    ("sm_90a", fused(D1, 16, **CONSUME)),
    ("sm_90a", fused(change(D2, ctas_per_row=4), 2, "node-local", **CONSUME)),
    ("sm_90a", fused(change(D2, ctas_per_row=2), 4)),
    ("sm_90a", fused(change(D1, release_early=False, enable_pdl=False, gate="scalar", ctas_per_row=2), 2)),
    ("sm_100a", fused(change(D2, hidden=256, ctas_per_row=1), 2)),
    ("sm_103a", fused(change(D1, hidden=4096, alpha_tensor=False, alpha=0.7), 4)),
]
MULTICAST = [(arch, fused(D1, 4, transport="multicast")) for arch in ARCHS]
MULTICAST += [("sm_90a", fused(D1, 8, transport="multicast", role="publish"))]


def name_of(case: Any) -> str:
    if isinstance(case, str):
        return case
    base = fused(D1, 2).as_dict()
    return ",".join(f"{k}={v}" for k, v in case.as_dict().items() if v != base[k]) or "D1"


each_case = pytest.mark.parametrize(("arch", "constants"), CASES, ids=name_of)
each_compiled = pytest.mark.parametrize(("arch", "constants"), CASES + MULTICAST, ids=name_of)


@functools.cache
def compiled(arch: str, constants: AllReduceDualNormConstants) -> tuple[str, bytes]:
    """(PTX, cubin)."""
    with tempfile.TemporaryDirectory() as folder:
        artifacts = all_reduce_dual_norm.build(constants, Target(arch), dump_dir=pathlib.Path(folder)).artifacts
        return artifacts.PTX, bytes(artifacts.CUBIN)


def kernels(arch: str, c: AllReduceDualNormConstants) -> list[ptx.Kernel]:
    return [ptx.Kernel(text, cluster=c.ctas_per_row) for text in ptx.entries(compiled(arch, c)[0])]


class Rank:
    """One rank's memory and everybody's mailbox, and a run of a kernel on them."""

    def __init__(self, c: AllReduceDualNormConstants, rank: int, rows: list[int] = CHOSEN) -> None:
        self.c, self.rank, self.rows = c, rank, len(rows)
        self.partials = [fp32.round_bf16(rows_for(c.hidden, 7 + p, 4 * p)[rows]) for p in range(c.tp)]
        self.partials = [_with_zeros(p) for p in self.partials]
        self.stream = rows_for(c.hidden, 2, 6)[rows]
        size = c.hidden if c.gate == "channel" else 1
        self.post_weight = _weight(c.hidden, 3) if c.post_weight != "none" else None
        self.alpha = vector_for(size, 4, 0.03, 1) if c.alpha_tensor else None
        self.beta, self.next_weight = vector_for(size, 5, 0, 1), _weight(c.hidden, 6)
        self.state = np.zeros(c.capacity, np.int32)
        self.state[: self.rows] = np.arange(self.rows) % 3
        self.status = np.zeros(1, np.int32)
        self.buffers = [np.full((3, c.tp, c.capacity, c.hidden), 0x8000, np.uint16) for _ in range(c.tp)]
        self.out = np.full(self.stream.shape, 7, np.uint16)

    def published(self, p: int) -> np.ndarray:
        return all_reduce.canonical(fp32.to_bf16(self.partials[p]))

    def receive(self, ranks: list[int]) -> None:
        """What these ranks publish arrives."""
        for p in ranks:
            for row, bits in enumerate(self.published(p)):
                self.buffers[self.rank][self.state[row], p, row] = bits

    def run(self, kernel: ptx.Kernel) -> None:
        c = self.c
        table = np.array([ptx.address_of((self.rank + i) % c.tp) for i in range(c.tp)] + [self.rank, 0], np.int64)
        weights = [None if w is None else fp32.to_bf16(w) for w in (self.post_weight, self.next_weight)]
        partial = fp32.to_bf16(self.partials[self.rank]) if c.role != "consume" else None
        arguments = [partial, self.stream, weights[0], self.alpha, self.beta, weights[1], self.out]
        if c.role == "publish":
            arguments = [partial]
        arguments += [table, self.state, *([] if c.role == "publish" else [self.status])]
        ctas = self.rows * c.ctas_per_row
        ptx.run(kernel, [a for a in arguments if a is not None], ctas, reached=self.buffers)

    def expected(self, arch: str) -> tuple[np.ndarray, np.ndarray]:
        total = all_reduce.all_reduce(self.partials, self.c.sum_order)
        operands = (self.post_weight, self.alpha, self.beta, self.next_weight)
        return dual.dual_norm(total, self.stream, *operands, self.c.boundary, arch)


def _weight(hidden: int, seed: int) -> np.ndarray:
    return fp32.round_bf16(vector_for(hidden, seed, -2, 2))


def _with_zeros(values: np.ndarray) -> np.ndarray:
    """Some -0, in neighbours and alone, and subnormals, in every row."""
    values = values.copy()
    values[:, 3:5] = -0.0
    values[:, 6:8] = -0.0
    values[:, 40:42] = np.float32(-1e-39)
    return values


@each_case
def test_bits(arch: str, constants: AllReduceDualNormConstants) -> None:
    c = constants
    for kernel in kernels(arch, c):
        for rank in {0, c.tp // 2, c.tp - 1} if c.tp < 16 else {9}:
            at = Rank(c, rank)
            others = [p for p in range(c.tp) if p != rank]
            at.receive(others if c.role == "both" else list(range(c.tp)))
            before, expected = at.state.copy(), at.expected(arch)
            at.run(kernel)
            got = [at.stream, fp32.from_bf16(at.out)]
            assert [fp32.differing(g, e) for g, e in zip(got, expected, strict=True)] == [0, 0]
            assert (at.buffers[rank] == 0x8000).all()  # armed again
            assert (at.state[: at.rows] == (before[: at.rows] + 1) % 3).all()
            assert (at.state[at.rows :] == 0).all()
            assert at.status[0] == 0
            _check_published(at, others if c.role == "both" else [], before)


def _check_published(at: Rank, to: list[int], generations: np.ndarray) -> None:
    """Exactly this rank's slots of the rows are published, to these ranks."""
    for p, buffer in enumerate(at.buffers):
        wanted = np.full(buffer.shape, 0x8000, np.uint16)
        if p in to:
            wanted[generations[: at.rows], at.rank, np.arange(at.rows)] = at.published(at.rank)
        assert (buffer == wanted).all(), p


@pytest.mark.parametrize("tp", [2, 8])
def test_the_publisher_alone(tp: int) -> None:
    (kernel,) = kernels("sm_90a", fused(D1, tp, role="publish"))
    at = Rank(fused(D1, tp, role="publish"), 1)
    at.run(kernel)
    _check_published(at, list(range(tp)), at.state)
    assert (at.state[: at.rows] == np.arange(at.rows) % 3).all()


def test_a_published_word_is_never_the_sentinel_and_else_unchanged() -> None:
    """Every BF16 value beside every kind of neighbour."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    c = fused(change(D1, hidden=256, ctas_per_row=1), 2, role="publish", capacity=1024)
    at = Rank(c, 0)
    halves = np.stack([np.repeat(bits[:, None], 2, 1), np.stack([bits, bits[::-1]], 1)]).reshape(-1, 256)
    at.rows, c = len(halves), at.c
    at.state = np.zeros(c.capacity, np.int32)
    table = np.array([ptx.address_of(0), ptx.address_of(1), 0, 0], np.int64)
    (kernel,) = kernels("sm_90a", c)
    ptx.run(kernel, [halves, table, at.state], at.rows, reached=at.buffers)
    assert (at.buffers[1][0, 0, : at.rows] == all_reduce.canonical(halves)).all()
    assert (at.buffers[1][0, 0, : at.rows].view(np.uint32) != 0x80008000).all()


def test_steps_of_all_ranks_with_changing_rows() -> None:
    """Publishers and consumers of four ranks over shared mailboxes, step after step, each with its own rows."""
    c = fused(change(D1, hidden=256, ctas_per_row=1), 4, **CONSUME)
    (publish,), (consume,) = kernels("sm_90a", dataclasses.replace(c, role="publish")), kernels("sm_90a", c)
    ranks = [Rank(c, rank) for rank in range(c.tp)]
    states, uses = np.zeros((c.tp, c.capacity), np.int32), np.zeros(c.capacity, np.int32)
    buffers = [ranks[0].buffers[rank] for rank in range(c.tp)]
    for step, rows in enumerate((1, 5, 12, 2, 3, 1, 12, 4)):
        ranks = [Rank(c, rank, [(7 * row + step) % 31 for row in range(rows)]) for rank in range(c.tp)]
        for number, at in enumerate(ranks):
            at.state, at.buffers = states[number], buffers
            table = np.array([ptx.address_of((number + i) % c.tp) for i in range(c.tp)] + [number, 0], np.int64)
            ptx.run(publish, [fp32.to_bf16(at.partials[number]), table, at.state], rows, reached=buffers)
        for at in ranks:
            expected = at.expected("sm_90a")
            at.run(consume)
            got = [at.stream, fp32.from_bf16(at.out)]
            assert [fp32.differing(g, e) for g, e in zip(got, expected, strict=True)] == [0, 0]
        uses[:rows] += 1
        assert (states == uses % 3).all()
    assert all((buffer == 0x8000).all() for buffer in buffers)


@pytest.mark.parametrize("role", ["both", "consume"])
def test_a_missing_rank_ends_in_nan_and_a_report(role: str) -> None:
    c = fused(D1, 4, role=role, timeout_s=2.0)
    at = Rank(c, 1, [16])
    at.receive([0, 3] if role == "both" else [0, 1, 3])
    at.run(kernels("sm_90a", c)[0])
    assert np.isnan(at.stream).all()
    assert np.isnan(fp32.from_bf16(at.out)).all()
    assert missing_of(int(at.status[0])) == Missing(rank=2, row=0, generation=0)
    assert (at.state == FAILED).all()


def test_a_failed_rank_gives_nan_and_publishes_nothing() -> None:
    c = fused(D1, 2)
    at = Rank(c, 0)
    at.receive([1])
    mailbox = at.buffers[0].copy()
    at.state[:] = FAILED
    at.run(kernels("sm_90a", c)[0])
    assert np.isnan(at.stream).all()
    assert np.isnan(fp32.from_bf16(at.out)).all()
    assert (at.state == FAILED).all()
    assert (at.buffers[1] == 0x8000).all()
    assert (at.buffers[0] == mailbox).all()
    assert at.status[0] == 0  # it did not wait


def test_the_report_names_rank_row_and_generation() -> None:
    c = fused(change(D1, hidden=256, ctas_per_row=1), 16, role="consume", timeout_s=1.0)
    at = Rank(c, 3, [16])
    at.state[0] = 2
    at.receive([p for p in range(16) if p not in (11, 14)])
    at.run(kernels("sm_90a", c)[0])
    assert missing_of(int(at.status[0])) == Missing(rank=11, row=0, generation=2)


@each_compiled
def test_what_waits_for_the_previous_grid(arch: str, constants: AllReduceDualNormConstants) -> None:
    """Table, weights and gates do not; partial and stream do, and the generation where this kernel publishes."""
    c = constants
    for kernel in kernels(arch, c):
        instructions = kernel.instructions()
        waits = [i for i, text in enumerate(instructions) if text.startswith("griddepcontrol.wait")]
        assert len(waits) == c.enable_pdl
        if not c.enable_pdl:
            continue
        (wait,) = waits
        early = collections.Counter(text.split(" ")[0] for text in instructions[:wait])
        late = collections.Counter(text.split(" ")[0] for text in instructions[wait:])
        assert early["ld.global.b64"] >= c.tp + 1 if c.role != "consume" else early["ld.global.b64"] >= 1
        assert late["ld.global.b64"] == 0
        # The generation of this row; once more beside the clock.
        generation = (early["ld.relaxed.gpu.global.b32"], late["ld.relaxed.gpu.global.b32"])
        polls = 2 * c.tp
        if c.wait_last:
            assert wait == len(instructions) - 2  # and the return
            assert generation == (2, 0)
            assert early["ld.relaxed.sys.global.v4.b32"] == polls
            continue
        assert generation == {"both": (0, 2), "consume": (1, 1), "publish": (0, 1)}[c.role]
        assert early["ld.relaxed.sys.global.v4.b32"] == 0
        assert late["ld.relaxed.sys.global.v4.b32"] == (polls if c.role != "publish" else 0)
        # Partial and stream; a publisher has no stream, a consumer no partial.
        assert late["ld.global.v4.b32"] == {"both": 3, "consume": 2, "publish": 1}[c.role]
        assert not any(op.startswith(("st.", "multimem.", "atom.")) for op in early)


@each_compiled
def test_instructions(arch: str, constants: AllReduceDualNormConstants) -> None:
    c = constants
    for kernel in kernels(arch, c):
        counts = collections.Counter(kernel.opcodes())
        # A float compare would flush a subnormal, and wait for ever.
        assert not [op for op in counts if re.match(r"setp.*\.f(16|32|64)|.*\.bf16.*setp", op)]
        stores = {"both": c.tp - 1, "publish": c.tp, "consume": 0}[c.role] if c.transport == "peer" else 0
        rearmed = 0 if c.role == "publish" else c.tp
        assert counts["st.relaxed.sys.global.v4.b32"] == stores + rearmed
        assert counts["multimem.st.relaxed.sys.global.v4.f32"] == (c.transport == "multicast")
        assert counts["atom.relaxed.gpu.global.cas.b32"] == (0 if c.role == "publish" else 2)
        additions = 0 if c.role == "publish" else 8 * _additions(c)
        assert counts["add.rn.ftz.f32"] == additions
        rounded = 0 if c.role == "publish" else 4 + 4 * (1 if c.sum_order == "mnnvl" else c.tp - 1)
        assert counts["cvt.rn.bf16x2.f32"] == rounded


def _additions(c: AllReduceDualNormConstants) -> int:
    """For one column: from +0 once or, in two chunks of 8, twice and once more; or from rank 0."""
    return c.tp - 1 if c.sum_order == "node-local" else c.tp + (c.tp > 8)


def test_the_order_of_the_additions() -> None:
    """Each addition takes the sum so far and the next rank's part: followed through the registers of one column."""
    (kernel, *_) = kernels("sm_90a", fused(D1, 4))
    adds = [text.partition(" ")[2].split(", ") for text in kernel.instructions() if text.startswith("add.rn.ftz.f32")]
    made = {target: (a, b) for target, a, b in adds}
    ends = [t for t in made if not any(t in sources for sources in made.values())]
    assert len(ends) == 8
    for end in ends:
        depth, at = 0, end
        while at in made:
            at, depth = made[at][0], depth + 1
        assert depth == 4


@each_compiled
def test_no_spills(arch: str, constants: AllReduceDualNormConstants) -> None:
    _, cubin = compiled(arch, constants)
    assert set(local_bytes(cubin)) == {0}
    # All rows of a full step are resident at once on an H200 (132 SMs): 64 rows of 1024 threads.
    assert all(0 < count <= (128 if constants.tp > 8 else 96) for count in registers(cubin))


@needs_nvdisasm
@each_compiled
def test_the_assembler_changed_nothing(arch: str, constants: AllReduceDualNormConstants) -> None:
    text, cubin = compiled(arch, constants)
    machine = instruction_counts(cubin)
    entries = [collections.Counter(ptx.Kernel(entry).opcodes()) for entry in ptx.entries(text)]
    written = sum(entries, collections.Counter())
    additions = written["add.rn.f32"] + written["add.rn.ftz.f32"]
    assert machine["FADD"] + 2 * machine["FADD2"] == additions + 2 * written["add.rn.f32x2"]
    assert machine["FMUL"] + 2 * machine["FMUL2"] == written["mul.rn.f32"] + 2 * written["mul.rn.f32x2"]
    assert machine["FFMA"] + 2 * machine["FFMA2"] == written["fma.rn.f32"] + 2 * written["fma.rn.f32x2"]
    assert machine["LDL"] == machine["STL"] == 0
