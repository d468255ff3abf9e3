"""Row norm: out = x * rsqrt(mean(x^2) + eps) * (weight + gain) by rows, and FP32 copies of x beside it.

The result equals, bit for bit, what the stock Triton kernel gives on the same architecture, up to hidden 8192: the row
is padded with zeros to a power of two, as there (read from Triton 3.8.0 PTX at 64, 1000, 4096, 7168 and 8192). Wider
rows stock sums tile by tile; here they are one tile, and no bits are promised.

The kernel is bound by latency: launch, one round of loads, two reductions. So a thread issues all its loads before it
uses any, weights even before it waits for the previous grid. And few rows leave most of the GPU idle while one SM,
which moves about 64 bytes a cycle, writes a row's 48 KiB. So a small batch gives each row to several CTAs: all of
them read and sum the whole row (again from L2, the same bits), and each writes its share of the results. They need
not talk to each other. Measured on an H200: benchmarks/notes.md.
"""

from collections.abc import Sequence
from typing import Any

from cutlass import Float32, Int32, Int64, cute

from muse_jit.constants.row_norm import RowNormConstants
from muse_jit.kernels import build as building
from muse_jit.kernels import exact, memory, reduction
from muse_jit.kernels.exact import F32

SPREAD_CTAS = 128
"""Rows are spread over more CTAs up to so many in all: one wave on 132 SMs (H100, H200) and on 148 (B200)."""

MAX_THREADS = 256
"""Triton's launch: 8 warps for one row. The cross-warp part of the sum is defined by it."""


def build(constants: RowNormConstants, target: building.Target, dump_dir: Any = None) -> Any:
    """Compile the row norm for these constants.

    The result takes, in this order and only those that the constants ask for: x [rows, hidden], weight [hidden],
    out [rows, hidden], stream [rows, hidden] FP32, aux [rows, hidden] FP32. No operand may partly overlap another.
    """
    constants.validate_for(target.arch)
    rows = building.symbolic_rows()
    operands = [building.row_tensor("fp32" if constants.x_fp32 else "bf16", rows, constants.hidden)]
    if constants.has_weight:
        operands.append(building.vector_tensor(constants.weight_dtype, constants.hidden))
    operands.append(building.row_tensor(constants.out_dtype, rows, constants.hidden))
    for copy in (constants.stream, constants.aux):
        if copy:
            operands.append(building.row_tensor("fp32", rows, constants.hidden))
    return building.compile_for(target, _RowNorm(constants, target.arch), *operands, dump_dir=dump_dir)


class _RowNorm:
    """The kernel of one constant set. Everything decided here is decided at compile time."""

    def __init__(self, constants: RowNormConstants, arch: str) -> None:
        self.constants = constants
        self.order = _order(constants, arch)
        self.packed = arch in exact.PACKED_ARCHS
        # A thread owns `width` consecutive columns, then again `step` columns further, `repeats` times in all; up to
        # `padding` values, the rest of its share of the power-of-two tile is zeros.
        # Triton (3.6.0 and 3.8.0 PTX) fills 16 bytes of the narrower of x and out: 4 only when both are FP32.
        self.width = 4 if constants.x_fp32 and constants.out_dtype == "fp32" else 8
        tile = max(1 << (constants.hidden - 1).bit_length(), self.width * reduction.WARP)
        self.threads = min(MAX_THREADS, tile // self.width)
        self.step = self.threads * self.width
        self.padding = tile // self.step * self.width
        self.repeats = -(-constants.hidden // self.step)

    @cute.jit
    def __call__(self, *operands_and_stream: Any) -> None:
        operands = operands_and_stream[:-1]
        rows = cute.size(operands[0], mode=[0])
        self.kernel(operands).launch(
            grid=(rows, self.parts(rows), 1),
            block=(self.threads, 1, 1),
            stream=operands_and_stream[-1],
            use_pdl=self.constants.enable_pdl,
        )

    def parts(self, rows: Int32) -> Int32:
        """How many CTAs share a row: 4 or 2 while all of them fit the GPU at once, else 1; host code."""
        parts = Int32(1)
        for count in (2, 4):
            if count <= self.repeats:
                parts = parts + Int32(rows * count <= SPREAD_CTAS) * Int32(count // 2)
        return parts

    @cute.kernel
    def kernel(self, operands: tuple[Any, ...]) -> None:
        self.trace(operands)

    def trace(self, operands: tuple[Any, ...]) -> None:
        """The device code. Plain Python at compile time: every loop here is unrolled, every `if` is decided."""
        c = self.constants
        x_tensor, *rest = operands
        weight_tensor = rest.pop(0) if c.has_weight else None
        out_tensor, *copies = rest
        place = _Place(self)

        # Weights never come from the previous grid, so they travel while it finishes. Everything else waits.
        weight_words = []
        if weight_tensor is not None:
            needed = place.inside if c.weight_before_norm else place.written
            weight_words = place.load(weight_tensor, needed, bf16=c.weight_dtype == "bf16", row=False)
        self.wait()
        x = [words.fp32() for words in place.load(x_tensor, place.inside, bf16=not c.x_fp32)]
        for tensor in copies:
            place.store(tensor, x, bf16=False)
        gain = [self.gain(words.fp32()) for words in weight_words]
        if c.weight_before_norm:
            x = [exact.mul_all(part, g, packed=self.packed) for part, g in zip(x, gain, strict=True)]

        values = [value for part in x for value in part]
        scale = self.scale(values + [Float32(0.0)] * (self.padding - len(values)), place.thread)
        y = [exact.mul_all(part, [scale] * self.width, packed=self.packed) for part in x]
        if c.has_weight and not c.weight_before_norm:
            y = [exact.mul_all(part, g, packed=self.packed) for part, g in zip(y, gain, strict=True)]
        place.store(out_tensor, y, bf16=c.out_dtype == "bf16")

    def wait(self) -> None:
        """Wait for the previous grid, and let the next one start, as far as the constants say."""
        if self.constants.enable_pdl:
            cute.arch.griddepcontrol_wait()
        if self.constants.release_early:
            cute.arch.griddepcontrol_launch_dependents()

    def gain(self, weight: F32) -> F32:
        """rn(weight + gain_center). Kept for a gain of 0.0 too: it turns a weight of -0.0 into +0.0, as stock does."""
        return exact.add_all(weight, [Float32(self.constants.gain_center)] * len(weight), packed=self.packed)

    def scale(self, x: F32, thread: Int32) -> Float32:
        """rsqrt(mean square + eps).

        Triton 3.8.0 PTX: sum * (1.0 / hidden) + eps is one FMA with 1 / hidden rounded to FP32, which is exact for
        powers of two. eps is rounded to FP32 first.
        """
        total = reduction.cta_sum(x, self.squares, self.threads // reduction.WARP, thread)
        mean = exact.fma(total, Float32(1.0 / self.constants.hidden), Float32(self.constants.eps))
        return exact.rsqrt(mean)

    def squares(self, x: F32) -> Float32:
        """The thread's own sum of squares, in the order `_order` chose."""
        if self.order == "chain":
            return reduction.squares_chain(x)
        if self.order == "pairwise":
            return reduction.squares_pairwise(x)
        if self.order == "two_lanes_fused":
            return reduction.squares_two_lanes_fused(x, packed=self.packed)
        return reduction.squares_two_lanes(x, packed=self.packed)


class _Place:
    """Where one thread works: its row, its columns, which of its repeats lie inside the row, and which it writes."""

    def __init__(self, norm: _RowNorm) -> None:
        self.norm = norm
        self.thread = Int32(cute.arch.thread_idx()[0])
        self.row = Int64(cute.arch.block_idx()[0])
        self.column = self.thread * Int32(norm.width)
        self.inside = [self._inside(r) for r in range(norm.repeats)]
        part, parts = Int32(cute.arch.block_idx()[1]), Int32(cute.arch.grid_dim()[1])
        mine = [Int32((Int32(r) & (parts - Int32(1))) == part) for r in range(norm.repeats)]
        self.written = [m if i is None else m & i for m, i in zip(mine, self.inside, strict=True)]

    def load(self, tensor: Any, needed: Sequence[Int32 | None], *, bf16: bool, row: bool = True) -> list[memory.Words]:
        """Issue the loads of this thread's columns of its row, or of a vector of the row's width, where needed."""
        base, pitch = self._address(tensor, bf16, row), self.norm.step * memory.element_bytes(bf16)
        return [
            memory.load(base, r * pitch, self.norm.width, bf16=bf16, inside=inside) for r, inside in enumerate(needed)
        ]

    def store(self, tensor: Any, values: list[F32], *, bf16: bool) -> None:
        """Write this thread's columns of its row, as far as they are this CTA's to write."""
        base, pitch = self._address(tensor, bf16, True), self.norm.step * memory.element_bytes(bf16)
        # Two lanes may trade when a row ends for both or for neither.
        sectors = not bf16 and self.norm.width == 8 and self.norm.constants.hidden % 16 == 0
        for r, written in enumerate(self.written):
            if sectors:
                memory.store_sectors(base, r * pitch, values[r], self.thread & Int32(1), written)
            else:
                memory.store(base, r * pitch, values[r], bf16=bf16, inside=written)

    def _address(self, tensor: Any, bf16: bool, row: bool) -> Int64:
        """Byte address of this thread's first column; 64 bits, for rows * hidden may pass 2^31."""
        size = memory.element_bytes(bf16)
        address: Int64 = tensor.iterator.toint() + Int64(self.column) * Int64(size)
        return address + self.row * Int64(self.norm.constants.hidden * size) if row else address

    def _inside(self, r: int) -> Int32 | None:
        """Whether repeat r of this thread lies in the row; None where it does for every thread (all of 8192)."""
        first = r * self.norm.step
        if first + self.norm.step <= self.norm.constants.hidden:
            return None
        return Int32(self.column < Int32(self.norm.constants.hidden - first))


def _order(constants: RowNormConstants, arch: str) -> str:
    """Which sum of squares stock has. Across lanes and warps all of them agree.

    - "chain": Triton 3.6.0 PTX: one FMA after the other in column order. (On sm_100 and later 3.6.0 rounds every
      other square of a weighted BF16 row with FP32 output; that one is not followed.)
    - "pairwise": Triton 3.8.0 PTX, sm_90.
    - "two_lanes": Triton 3.8.0 PTX, sm_100 and sm_103: `mul.f32` squares, then `add.f32x2`. Its assembler cannot fuse
      a scalar multiplication into a packed addition, so the SASS has 32 FMUL and 15 FADD2.
    - "two_lanes_fused": the same source where x is scaled by the weight first, because then the squares are packed
      too and Triton itself emits `fma.rn.f32x2`; and everything on sm_120, whose PTX is sm_100's, but which has no
      packed units: its assembler splits the additions and fuses their first level (SASS: 16 FMUL, 16 FFMA).
    """
    if constants.order == "triton-3.6":
        return "chain"
    if arch.startswith("sm_90"):
        return "pairwise"
    if arch.startswith("sm_12") or constants.weight_before_norm:
        return "two_lanes_fused"
    return "two_lanes"
