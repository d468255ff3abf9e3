"""Small-M GEMM: out [b, n] = x [b, k] weight [n, k]^T for the few rows of a decode step; BF16, FP32 sums.

The time is that of reading the weight once, so everything serves that: each thread loads 16 bytes of its weight rows
directly into registers, in the layout of the MMA, many loads deep and before the wait for the previous grid, on which
the weight does not depend. Nothing is staged in shared memory: no element of the weight is used by two threads.

The MMA wants of a thread two columns here and two columns eight further on. The order of the columns of a sum is free
as long as weight and x agree, so of each 32 columns thread t of a row takes 8 t to 8 t + 7, 16 bytes of both, and they
are two MMA steps. Rows of the weight are the MMA's 16 rows, rows of x its 8 columns.

The warps of a block divide K, and their parts are added in a fixed order: the same input gives the same bits, and a
row's bits depend on nothing but that row.
"""

from typing import Any

from cutlass import Float32, Int32, Int64, cute
from cutlass.cutlass_dsl import T

from muse_jit.constants.small_m_gemm import K_BLOCK, M_TILE, N_TILE, WARP, SmallMGemmConstants
from muse_jit.kernels import build as building
from muse_jit.kernels import exact, memory

Words = list[Int32]


def build(constants: SmallMGemmConstants, target: building.Target, dump_dir: Any = None) -> Any:
    """Compile the GEMM; the result takes x [b, k], weight [n, k] and out [b, n], all BF16, 1 <= b <= rows."""
    constants.validate_for(target.arch)
    rows = building.symbolic_rows()
    operands = (
        building.row_tensor("bf16", rows, constants.k),
        building.row_tensor("bf16", constants.n, constants.k),
        building.row_tensor("bf16", rows, constants.n),
    )
    return building.compile_for(target, _SmallMGemm(constants), *operands, dump_dir=dump_dir)


class _SmallMGemm:
    """The kernel of one constant set. Everything decided here is decided at compile time."""

    def __init__(self, constants: SmallMGemmConstants) -> None:
        c = self.constants = constants
        self.threads = c.warps * WARP
        self.groups = c.tile_n // (M_TILE * c.m_tiles)
        self.blocks = c.k_warp // K_BLOCK
        self.n_tiles = c.rows // N_TILE
        self.pitch = c.pitch

    @cute.jit
    def __call__(self, x: Any, weight: Any, out: Any, stream: Any) -> None:
        c = self.constants
        self.kernel(x, weight, out).launch(
            grid=(c.n // c.tile_n, 1, 1),
            block=(self.threads, 1, 1),
            stream=stream,
            use_pdl=c.enable_pdl,
        )

    @cute.kernel
    def kernel(self, x: Any, weight: Any, out: Any) -> None:
        self.trace(x, weight, out)

    def trace(self, x: Any, weight: Any, out: Any) -> None:
        """The device code. Plain Python at compile time: every loop here is unrolled, every `if` is decided."""
        c = self.constants
        place = _Place(self)
        weights = place.weights(weight)
        ahead = [self.load_weight(weights, block) for block in range(c.depth)]
        if c.enable_pdl:
            cute.arch.griddepcontrol_wait()
            if c.release_early:
                cute.arch.griddepcontrol_launch_dependents()
        rows = Int32(cute.size(x, mode=[0]))
        tokens = place.tokens(x, rows)
        zero = Float32(0.0)
        sums = [[[zero] * 4 for _ in range(self.n_tiles)] for _ in range(c.m_tiles)]
        x_next = self.load_x(tokens, 0)
        for block in range(self.blocks):
            x_words = x_next
            if block + 1 < self.blocks:
                x_next = self.load_x(tokens, block + 1)
            w_words = ahead.pop(0)
            if block + c.depth < self.blocks:
                ahead.append(self.load_weight(weights, block + c.depth))
            for m, (upper, lower) in enumerate(w_words):
                for n in range(self.n_tiles):
                    for step in (0, 2):
                        a = (upper[step], lower[step], upper[step + 1], lower[step + 1])
                        b = (x_words[n][step], x_words[n][step + 1])
                        sums[m][n] = _mma(a, b, sums[m][n])
        self.finish(place, sums, out, rows)

    def load_weight(self, addresses: list[tuple[Int64, Int64]], block: int) -> list[tuple[Words, Words]]:
        """A K block of this warp's rows: for each 16-row tile the upper and the lower row of this thread."""
        offset = 2 * K_BLOCK * block
        return [(_load_streaming(upper, offset), _load_streaming(lower, offset)) for upper, lower in addresses]

    def load_x(self, tokens: list[tuple[Int64, Int32]], block: int) -> list[Words]:
        """The same K block of this thread's row of x in each tile; zeros beyond the last row."""
        return [memory.load(a, 2 * K_BLOCK * block, 8, bf16=True, inside=inside).words for a, inside in tokens]

    def finish(self, place: "_Place", sums: list[list[list[Float32]]], out: Any, rows: Int32) -> None:
        """Add the parts of the warps that divide K, in their order, and store."""
        c = self.constants
        shared = place.shared
        part = self.pitch * c.rows * 4
        for m in range(c.m_tiles):
            for n in range(self.n_tiles):
                for i, value in enumerate(sums[m][n]):
                    column, row = N_TILE * n + i % 2, M_TILE * m + 8 * (i // 2)
                    _store_shared(place.corner, 4 * (column * self.pitch + row), value)
        cute.arch.sync_threads()
        pairs = c.tile_n // 2
        total = pairs * c.rows
        for first in range(0, total, self.threads):
            index = place.thread + Int32(first)
            token, pair = index // Int32(pairs), index % Int32(pairs)
            # A block may have more threads than results: the rest read the last one's place and store nothing.
            slot = exact.select(Int32(token < Int32(c.rows)), token, Int32(c.rows - 1))
            address = shared + slot * Int32(4 * self.pitch) + pair * Int32(8)
            low, high = _load_shared_pair(address, 0)
            for k_slice in range(1, c.k_slices):
                more = _load_shared_pair(address, k_slice * part)
                low, high = exact.add(low, more[0]), exact.add(high, more[1])
            inside = Int32(token < rows)
            target = (
                out.iterator.toint()
                + Int64(token) * Int64(2 * c.n)
                + Int64(place.tile) * Int64(2 * c.tile_n)
                + Int64(pair) * Int64(4)
            )
            memory.store(target, 0, [low, high], bf16=True, inside=inside)


class _Place:
    """Where a thread works: its block's outputs, its warp's tiles and share of K, its rows in the fragments."""

    def __init__(self, gemm: _SmallMGemm) -> None:
        c = self.constants = gemm.constants
        self.gemm = gemm
        self.thread = Int32(cute.arch.thread_idx()[0])
        self.tile = Int32(cute.arch.block_idx()[0])
        warp = self.thread >> Int32(5)
        lane = self.thread & Int32(WARP - 1)
        self.group, self.slice = warp % Int32(gemm.groups), warp // Int32(gemm.groups)
        self.quad, self.member = lane >> Int32(2), lane & Int32(3)
        self.column_bytes = Int64(self.slice * Int32(2 * c.k_warp) + self.member * Int32(16))
        self.shared = Int32(cute.arch.alloc_smem(Float32, c.shared_bytes // 4, alignment=128).toint())
        corner = self.slice * Int32(gemm.pitch * c.rows) + self.member * Int32(2 * gemm.pitch)
        corner = corner + self.group * Int32(M_TILE * c.m_tiles) + self.quad
        self.corner = self.shared + corner * Int32(4)

    def weights(self, weight: Any) -> list[tuple[Int64, Int64]]:
        """Byte addresses of this thread's two rows of each of its warp's 16-row tiles."""
        c = self.constants
        pitch = Int64(2 * c.k)
        row = self.tile * Int32(c.tile_n) + self.group * Int32(M_TILE * c.m_tiles) + self.quad
        base = weight.iterator.toint() + Int64(row) * pitch + self.column_bytes
        return [(base + Int64(M_TILE * m) * pitch, base + Int64(M_TILE * m + 8) * pitch) for m in range(c.m_tiles)]

    def tokens(self, x: Any, rows: Int32) -> list[tuple[Int64, Int32]]:
        """Byte address of this thread's row of x in each 8-row tile, and whether there is such a row."""
        result = []
        for n in range(self.gemm.n_tiles):
            token = self.quad + Int32(N_TILE * n)
            address = x.iterator.toint() + Int64(token) * Int64(2 * self.constants.k) + self.column_bytes
            result.append((address, Int32(token < rows)))
        return result


def _mma(a: tuple[Int32, ...], b: tuple[Int32, ...], c: list[Float32]) -> list[Float32]:
    """One m16n8k16 step on BF16 with FP32 sums."""
    text = (
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    )
    struct = exact.struct_type([T.f32()] * 4)
    result = exact.asm(struct, [*a, *b, *c], text, "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f")
    return exact.unpack(result, 4, T.f32(), Float32)


def _load_streaming(base: Int64, offset: int) -> Words:
    """16 bytes that nobody reads again: past L1, and fetched into L2 by 256 bytes, which the row's others take."""
    text = f"ld.global.L1::no_allocate.L2::256B.v4.b32 {{$0, $1, $2, $3}}, [$4+{offset}];"
    result = exact.asm(exact.struct_type([T.i32()] * 4), [base], text, "=r,=r,=r,=r,l", side_effects=True)
    return exact.unpack(result, 4, T.i32(), Int32)


def _store_shared(address: Int32, offset: int, value: Float32) -> None:
    operands = [address, exact.fp32_to_bits(value)]
    exact.asm(None, operands, f"st.shared.b32 [$0+{offset}], $1;", "r,r", side_effects=True)


def _load_shared_pair(address: Int32, offset: int) -> tuple[Float32, Float32]:
    text = f"ld.shared.v2.b32 {{$0, $1}}, [$2+{offset}];"
    result = exact.asm(exact.struct_type([T.i32()] * 2), [address], text, "=r,=r,r", side_effects=True)
    low, high = exact.unpack(result, 2, T.i32(), Int32)
    return exact.fp32_from_bits(low), exact.fp32_from_bits(high)
