"""The row norm as compiled: its PTX, run on numpy arrays, gives the bits that stock's order of operations gives.

Nothing here needs a GPU. What the assembler makes of the PTX is looked at in the cubin: it must not have fused or
unfused anything, nor spilled.
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
from oracle import fp32, norms, ptx
from oracle.sass import instruction_counts, local_bytes, needs_nvdisasm, registers

from muse_jit.constants.row_norm import RowNormConstants
from muse_jit.kernels import row_norm

ARCHS = ("sm_90a", "sm_100a", "sm_103a", "sm_120a")
BASE = RowNormConstants(hidden=8192, eps=1e-5, has_weight=True, gain_center=1.0)
PLAIN = RowNormConstants(hidden=8192, eps=1e-5, has_weight=False)
FRONT = dataclasses.replace(BASE, stream=True, release_early=True)


@dataclasses.dataclass(frozen=True)
class Target:
    arch: str


def change(base: RowNormConstants, **fields: Any) -> RowNormConstants:
    return dataclasses.replace(base, **fields)


# What the serving plan holds, on every architecture; then each flag at least once, where its code can differ.
CASES = [
    *[(arch, c) for arch in ARCHS for c in (FRONT, change(FRONT, x_fp32=True))],
    *[(arch, change(BASE, weight_before_norm=True, x_fp32=True)) for arch in ARCHS],
    *[(arch, change(PLAIN, x_fp32=True, out_dtype="fp32")) for arch in ARCHS],
    ("sm_90a", change(FRONT, aux=True)),
    ("sm_100a", change(FRONT, aux=True, x_fp32=True, release_early=False)),
    ("sm_90a", change(PLAIN, out_dtype="fp32", enable_pdl=False)),
    ("sm_100a", PLAIN),
    ("sm_90a", change(BASE, weight_dtype="fp32", gain_center=0.0)),
    ("sm_103a", change(BASE, weight_dtype="fp32", weight_before_norm=True, gain_center=-0.5)),
    ("sm_90a", change(FRONT, order="triton-3.6")),
    ("sm_90a", change(FRONT, order="triton-3.6", x_fp32=True)),
    ("sm_90a", change(BASE, order="triton-3.6", x_fp32=True, out_dtype="fp32", stream=True)),
    ("sm_100a", change(BASE, order="triton-3.6", x_fp32=True)),
    ("sm_90a", change(FRONT, hidden=8)),
    ("sm_100a", change(FRONT, hidden=1000, x_fp32=True)),
    ("sm_90a", change(FRONT, hidden=4096, x_fp32=True)),
    ("sm_120a", change(BASE, hidden=7176, x_fp32=True, out_dtype="fp32", weight_before_norm=True)),
    ("sm_90a", change(FRONT, hidden=10248, x_fp32=True, aux=True)),
    ("sm_100a", change(BASE, hidden=16384, x_fp32=True)),
]


def name_of(case: Any) -> str:
    if isinstance(case, str):
        return case
    differing = {k: v for k, v in case.as_dict().items() if v != BASE.as_dict()[k]}
    return ",".join(f"{k}={v}" for k, v in differing.items()) or "base"


each_case = pytest.mark.parametrize(("arch", "constants"), CASES, ids=name_of)


@functools.cache
def compiled(arch: str, constants: RowNormConstants) -> tuple[str, bytes]:
    """(PTX, cubin)."""
    with tempfile.TemporaryDirectory() as folder:
        artifacts = row_norm.build(constants, Target(arch), dump_dir=pathlib.Path(folder)).artifacts
        return artifacts.PTX, bytes(artifacts.CUBIN)


def rows_for(constants: RowNormConstants, seed: int) -> np.ndarray:
    """Rows in which a wrong order shows, and rows of special values."""
    random = np.random.default_rng(seed)
    hidden = constants.hidden
    plain = random.standard_normal((24, hidden))
    scaled = plain[:4] * 10.0 ** random.uniform(-30, 30, (4, hidden))
    mild = plain[:8] * 10.0 ** random.uniform(-2, 2, (8, hidden))
    tiny = plain[:2] * 1e-40
    with np.errstate(over="ignore"):
        x = np.concatenate([plain, scaled, mild, tiny, np.zeros((6, hidden))]).astype(np.float32)
    x[-6:] = x[:6]
    x[-1] = -0.0
    x[-2, hidden // 2] = np.inf
    x[-3, hidden - 1] = np.nan
    x[-4, 0] = -np.inf
    x[-5, 1] = np.float32(3e38)
    x[-6, ::2] = 0.0
    return x if constants.x_fp32 else fp32.round_bf16(x)


def weight_for(constants: RowNormConstants, seed: int) -> np.ndarray | None:
    if not constants.has_weight:
        return None
    weight = np.random.default_rng(seed).standard_normal(constants.hidden).astype(np.float32)
    weight[:4] = [0.0, -0.0, -1.0, 1e-39]
    return weight if constants.weight_dtype == "fp32" else fp32.round_bf16(weight)


class Spy:
    """The rsqrt of both sides. Its operands are compared too: a wrong sum often vanishes in a rounded output."""

    def __init__(self) -> None:
        self.operands: list[np.ndarray] = []

    def __call__(self, a: np.ndarray) -> np.ndarray:
        self.operands.append(np.array(a))
        return fp32.rsqrt(a)


def run(
    text: str, constants: RowNormConstants, x: np.ndarray, weight: np.ndarray | None, spy: Spy, parts: int = 1
) -> list[np.ndarray]:
    """Out, stream, aux (those present) as FP32, from running the PTX on operands filled with a poison value.

    `parts` CTAs share a row; each must write its own part and nothing else.
    """
    c = constants
    arguments = [x.copy() if c.x_fp32 else fp32.to_bf16(x)]
    if weight is not None:
        arguments.append(weight.copy() if c.weight_dtype == "fp32" else fp32.to_bf16(weight))
    results = [np.full(x.shape, 7, np.float32 if c.out_dtype == "fp32" else np.uint16)]
    results += [np.full(x.shape, 7, np.float32) for wanted in (c.stream, c.aux) if wanted]
    for part in range(parts):
        ptx.run(ptx.Kernel(text), arguments + results, x.shape[0], spy, y=(part, parts))
    return [r if r.dtype == np.float32 else fp32.from_bf16(r) for r in results]


@each_case
def test_bits(arch: str, constants: RowNormConstants) -> None:
    x, weight = rows_for(constants, 1), weight_for(constants, 2)
    spy, expected_spy = Spy(), Spy()
    got = run(compiled(arch, constants)[0], constants, x, weight, spy)
    expected = [e for e in norms.row_norm(x, weight, constants, arch, expected_spy) if e is not None]
    (means,), (expected_means,) = spy.operands, expected_spy.operands
    assert fp32.differing(means, np.broadcast_to(expected_means[:, None], means.shape)) == 0
    assert [fp32.differing(g, e) for g, e in zip(got, expected, strict=True)] == [0] * len(got)


@pytest.mark.parametrize(
    "constants", [FRONT, change(FRONT, x_fp32=True, aux=True), change(BASE, hidden=7176)], ids=name_of
)
@pytest.mark.parametrize("parts", [2, 4])
def test_parts_of_a_row_make_a_whole(constants: RowNormConstants, parts: int) -> None:
    x, weight = rows_for(constants, 3), weight_for(constants, 4)
    text = compiled("sm_90a", constants)[0]
    spy, whole_spy = Spy(), Spy()
    whole, shared = run(text, constants, x, weight, whole_spy), run(text, constants, x, weight, spy, parts)
    assert [fp32.differing(a, b) for a, b in zip(whole, shared, strict=True)] == [0] * len(whole)
    assert len(spy.operands) == parts
    assert all(fp32.differing(mean, whole_spy.operands[0]) == 0 for mean in spy.operands)


def test_orders_are_told_apart() -> None:
    """The rows above are rows in which every other order gives other sums, so the comparison means something."""
    x = rows_for(change(BASE, x_fp32=True), 1)[:24]
    orders = [norms.squares_pairwise, norms.squares_two_lanes, norms.squares_two_lanes_fused, norms.squares_chain]
    sums = [norms.row_sum(x, 8, order) for order in orders] + [norms.row_sum(x, 4, norms.squares_pairwise)]
    for i, a in enumerate(sums):
        for b in sums[i + 1 :]:
            assert fp32.differing(a, b) > 0


def width_of(constants: RowNormConstants) -> int:
    return 4 if constants.x_fp32 and constants.out_dtype == "fp32" else 8


def accesses(constants: RowNormConstants, bf16: bool, threads: int) -> int:
    """Vector accesses one thread needs for its share of a row: 16 bytes each, 8 for four BF16."""
    width = width_of(constants)
    return -(-constants.hidden // (threads * width)) * max(width * (2 if bf16 else 4) // 16, 1)


@each_case
def test_instructions(arch: str, constants: RowNormConstants) -> None:
    c, kernel = constants, ptx.Kernel(compiled(arch, constants)[0])
    counts = collections.Counter(kernel.opcodes())
    assert counts["rsqrt.approx.ftz.f32"] == 1
    arithmetic = {op for op in counts if re.match(r"(add|sub|mul|mad|fma|div|neg)\.(.*\.)?f(16|32|64)", op)}
    assert all(re.fullmatch(r"(add|mul|fma)\.rn\.f32(x2)?", op) for op in arithmetic), arithmetic
    allowed = {"ld.param.b64", "ld.global.v4.b32", "st.global.v4.b32", "ld.shared.b32", "st.shared.b32"}
    if width_of(c) == 4 and c.has_weight and c.weight_dtype == "bf16":
        allowed.add("ld.global.v2.b32")
    assert {op for op in counts if op.startswith(("ld.", "st."))} <= allowed
    loads = accesses(c, not c.x_fp32, kernel.threads)
    if c.has_weight:
        loads += accesses(c, c.weight_dtype == "bf16", kernel.threads)
    assert counts["ld.global.v4.b32"] + counts["ld.global.v2.b32"] == loads
    stores = accesses(c, c.out_dtype == "bf16", kernel.threads)
    stores += (c.stream + c.aux) * accesses(c, False, kernel.threads)
    assert counts["st.global.v4.b32"] == stores
    assert not any(op.startswith(("bra", "call")) for op in counts)


@each_case
def test_waiting(arch: str, constants: RowNormConstants) -> None:
    """Weights are loaded before the wait, x only after it; the release, if asked for, follows the wait at once."""
    c, kernel = constants, ptx.Kernel(compiled(arch, constants)[0])
    opcodes = kernel.opcodes()
    loads = [i for i, op in enumerate(opcodes) if op.startswith("ld.global")]
    waits = [i for i, op in enumerate(opcodes) if op == "griddepcontrol.wait"]
    releases = [i for i, op in enumerate(opcodes) if op == "griddepcontrol.launch_dependents"]
    assert len(waits) == c.enable_pdl
    assert releases == ([waits[0] + 1] if c.release_early else [])
    if c.enable_pdl:
        of_weight = accesses(c, c.weight_dtype == "bf16", kernel.threads) if c.has_weight else 0
        assert sum(i < waits[0] for i in loads) == of_weight
        assert all(i > waits[0] for i, op in enumerate(opcodes) if op.startswith("st."))
    first_use = next(i for i, op in enumerate(opcodes) if op.startswith(("mul.rn", "fma.rn", "add.rn", "st.")))
    assert max(loads) < first_use


@each_case
def test_no_spills(arch: str, constants: RowNormConstants) -> None:
    _, cubin = compiled(arch, constants)
    assert local_bytes(cubin) == [0]
    assert 0 < registers(cubin)[0] <= (128 if constants.hidden <= 8192 else 255)


@needs_nvdisasm
@pytest.mark.parametrize(("arch", "constants"), CASES[::2], ids=name_of)
def test_the_assembler_changed_nothing(arch: str, constants: RowNormConstants) -> None:
    """As many roundings of each kind in the machine code as in the PTX, so nothing was fused or split.

    Fewer only where a row does not fill its tile: the zeros' share may be computed at compile time.
    """
    text, cubin = compiled(arch, constants)
    machine = instruction_counts(cubin)
    assert machine["LDL"] == machine["STL"] == 0
    written = collections.Counter(ptx.Kernel(text).opcodes())
    for word, name in (("mul", "FMUL"), ("add", "FADD"), ("fma", "FFMA")):
        for suffix, lanes in (("f32", ""), ("f32x2", "2")):
            found, expected = machine[name + lanes], written[f"{word}.rn.{suffix}"]
            assert found == expected or (found < expected and constants.hidden & (constants.hidden - 1))
