"""Dual norm: post-norm, gated addition to the residual stream and the next pre-norm, in one kernel.

stream = alpha * stream + beta * norm(partial), in place, and out = norm(stream). The result equals the stock kernel of
the chosen order bit for bit at hidden 8192: Triton's on the same architecture, or FlashInfer's.

A decode step is a few rows, so the time is latency: launch, one round of loads, two sums over the row. Therefore
- every load is issued before the first use, and what does not come from the previous grid even before the wait for it;
- a row can be shared by the CTAs of a cluster. They are on different SMs, so the shuffles, which a single SM with 1024
  threads would queue up, run side by side, as do the loads;
- a sum over the row has one exchange: each warp tells its sum to all CTAs of the row, and each thread adds all sums
  itself. Each sum has its own slots, so no barrier protects their reuse;
- of many rows the messages are too many for the network between the SMs: then a CTA first adds up its own warps, which
  costs a barrier and saves three of four messages;
- the new stream is stored before the second exchange is waited for, in whole sectors.
What each of these gave on an H200 is in benchmarks/notes.md.
"""

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.runtime import make_fake_compact_tensor

from muse_jit.constants.dual_norm import WARP, WIDTH, DualNormConstants
from muse_jit.kernels import build as building
from muse_jit.kernels import exact, memory, reduction
from muse_jit.kernels.exact import F32
from muse_jit.kernels.row_exchange import Exchange, ExchangeByCta

DIRECT_ROWS = 24
"""Up to so many rows every warp tells every CTA; beyond, a CTA adds up its own warps first."""


def build(constants: DualNormConstants, target: building.Target, dump_dir: Any = None) -> Any:
    """Compile the dual norm for these constants.

    The result takes, in this order and only those that the constants ask for: partial [rows, hidden] BF16, stream
    [rows, hidden] FP32 (updated in place), post_weight [hidden] BF16, alpha and beta FP32 [hidden] or [1],
    next_weight [hidden] BF16, out [rows, hidden]. No operand may overlap another.
    """
    constants.validate_for(target.arch)
    operands = boundary_operands(constants, building.symbolic_rows())
    return building.compile_for(target, BoundaryKernel(constants, target.arch), *operands, dump_dir=dump_dir)


def boundary_operands(c: DualNormConstants, rows: Any) -> list[Any]:
    """The operands above, as the compiler is told of them."""
    operands = [building.row_tensor("bf16", rows, c.hidden), building.row_tensor("fp32", rows, c.hidden)]
    if c.post_weight != "none":
        operands.append(building.vector_tensor("bf16", c.hidden))
    for _ in range(1 + c.alpha_tensor):
        operands.append(_gate_tensor(c))
    if c.next_has_weight:
        operands.append(building.vector_tensor("bf16", c.hidden))
    operands.append(building.row_tensor(c.out_dtype, rows, c.hidden))
    return operands


def _gate_tensor(constants: DualNormConstants) -> Any:
    if constants.gate == "channel":
        return building.vector_tensor("fp32", constants.hidden)
    return make_fake_compact_tensor(building.ELEMENTS["fp32"], (1,), assumed_align=4)  # may be a view of one element


class Place:
    """Where a thread works: thread g of the row, over all its CTAs, owns columns 8 g to 8 g + 7.

    With `halves`, it owns columns 4 g to 4 g + 3 and the same of the second half of the padded row.
    """

    def __init__(self, constants: DualNormConstants, *, halves: bool) -> None:
        self.constants = constants
        self.thread = Int32(cute.arch.thread_idx()[0])
        block = Int32(cute.arch.block_idx()[0])
        # Clusters are neighbours in the grid, so the rank of a CTA in its cluster needs no special register.
        ctas = constants.ctas_per_row
        self.rank = block & Int32(ctas - 1)
        self.row = Int64(block >> Int32(ctas.bit_length() - 1))
        tile = constants.row_threads * WIDTH
        self.starts = (0, tile // 2) if halves else (0,)
        self.width = WIDTH // len(self.starts)
        # A CTA has every ctas-th warp of the row: the first levels of the butterfly over warps are then inside it.
        self.warp = (self.thread >> Int32(5)) * Int32(ctas) + self.rank
        self.lane = self.thread & Int32(WARP - 1)
        self.column = (self.warp * Int32(WARP) + self.lane) * Int32(self.width)
        # None where no thread is outside.
        last = [start + self.width * constants.row_threads for start in self.starts]
        self.inside = [
            None if end <= constants.hidden else Int32(self.column < Int32(constants.hidden - start))
            for start, end in zip(self.starts, last, strict=True)
        ]

    def columns(self, tensor: Any, *, bf16: bool) -> Int64:
        """Byte address of this thread's first column."""
        address: Int64 = tensor.iterator.toint() + Int64(self.column) * Int64(memory.element_bytes(bf16))
        return address

    def rows(self, tensor: Any, *, bf16: bool) -> Int64:
        """The same in this thread's row; 64 bits, for rows * hidden may pass 2^31."""
        return self.columns(tensor, bf16=bf16) + self.row * Int64(self.constants.hidden * memory.element_bytes(bf16))

    def load(self, address: Int64, *, bf16: bool) -> memory.Words:
        words: list[Int32] = []
        for start, inside in zip(self.starts, self.inside, strict=True):
            offset = start * memory.element_bytes(bf16)
            words += memory.load(address, offset, self.width, bf16=bf16, inside=inside).words
        return memory.Words(words, bf16)

    def store(self, address: Int64, values: F32, *, bf16: bool) -> None:
        for i, (start, inside) in enumerate(zip(self.starts, self.inside, strict=True)):
            mine = values[i * self.width : (i + 1) * self.width]
            if not bf16 and self.width == WIDTH and self.constants.hidden % (2 * WIDTH) == 0:
                memory.store_sectors(address, start * 4, mine, self.lane & Int32(1), inside)
            else:
                memory.store(address, start * memory.element_bytes(bf16), mine, bf16=bf16, inside=inside)

    def vector(self, tensor: Any | None, *, bf16: bool) -> memory.Words | None:
        return None if tensor is None else self.load(self.columns(tensor, bf16=bf16), bf16=bf16)

    def gate(self, tensor: Any | None) -> memory.Words | None:
        """A gate vector, or the one element that stands for all columns."""
        if tensor is not None and self.constants.gate == "scalar":
            return memory.load(tensor.iterator.toint(), 0, 1, bf16=False)
        return self.vector(tensor, bf16=False)

    def spread(self, words: memory.Words | None) -> F32:
        """A gate's value for each column; none without the operand."""
        values = words.fp32() if words is not None else []
        return values * WIDTH if len(values) == 1 else values


class Partial:
    """The partial sum that a boundary begins with: here the first operand. All-reduced ones have more to do.

    The kernel calls these methods in the order in which they stand.
    """

    leading = 1
    """Operands before the stream that belong to it."""

    def __init__(self, operands: tuple[Any, ...], place: Place, first_place: Place | None) -> None:
        self.place, self.first_place = place, first_place
        self.address = place.rows(operands[0], bf16=True)
        self.first_address = first_place.rows(operands[0], bf16=True) if first_place is not None else None

    def load_early(self) -> None:
        """Loads that need not wait for the previous grid."""

    def load(self) -> None:
        """Loads that must."""
        self.first = None
        if self.first_place is not None:
            self.first = self.first_place.load(self.first_address, bf16=True)
        self.loaded = self.place.load(self.address, bf16=True)

    def publish(self) -> None:
        """Tell other ranks, before this CTA waits for the others of its cluster."""

    def words(self) -> tuple[memory.Words, memory.Words | None]:
        """The thread's columns; and, where the first sum is over other columns, those."""
        return self.loaded, self.first

    def taken(self) -> None:
        """This thread has used its columns, and the first sum is on its way."""

    def taken_by_all(self) -> None:
        """The first sum is known here, so every thread of the row has used its columns."""


class BoundaryKernel:
    """The kernel of one constant set. Everything decided here is decided at compile time."""

    wait_last = False
    """Wait for the previous grid at the end only; for a kernel that learns by other means that its inputs are there."""

    def __init__(self, constants: DualNormConstants, arch: str) -> None:
        self.constants = constants
        self.packed = arch in exact.PACKED_ARCHS
        self.first_order, self.second_order = _orders(constants, arch)
        # Triton (3.6.0 and 3.8.0 PTX) turns the new stream to 4 consecutive FP32 columns a thread in order to store it.
        # Where it also stores the output so, it turns it before the second sum, which then is over other columns than
        # the first. Here everything is laid out like the second sum, and the first reads the partial sum once more.
        triton = constants.order.startswith("triton")
        self.halves = triton and constants.out_dtype == "fp32" and not constants.next_weight_before

    @cute.jit
    def __call__(self, *operands_and_stream: Any) -> None:
        operands, stream = operands_and_stream[:-1], operands_and_stream[-1]
        rows = Int32(cute.size(operands[0], mode=[0]))
        # Two kernels, between which host code chooses. What is decided at compile time stays in a condition of its
        # own: joined with a run-time one it would be decided at run time.
        if cutlass.const_expr(self.constants.ctas_per_row == 1):  # noqa: SIM114
            self.start(operands, rows, stream, False)
        elif rows <= DIRECT_ROWS:
            self.start(operands, rows, stream, False)
        else:
            self.start(operands, rows, stream, True)

    def start(self, operands: tuple[Any, ...], rows: Int32, stream: Any, by_cta: bool) -> None:
        """Launch one of the kernels; with `by_cta` a CTA adds up its own warps before it tells the others."""
        ctas = self.constants.ctas_per_row
        self.kernel(operands, by_cta).launch(
            grid=(rows * ctas, 1, 1),
            block=(self.constants.threads_per_cta, 1, 1),
            cluster=(ctas, 1, 1) if ctas > 1 else None,
            stream=stream,
            use_pdl=self.constants.enable_pdl,
        )

    @cute.kernel
    def kernel(self, operands: tuple[Any, ...], by_cta: cutlass.Constexpr) -> None:
        self.trace(operands, by_cta)

    def trace(self, operands: tuple[Any, ...], by_cta: bool) -> None:
        """The device code. Plain Python at compile time: every loop here is unrolled, every `if` is decided."""
        c = self.constants
        place = Place(c, halves=self.halves)
        first_place = Place(c, halves=False) if self.halves else None
        partial = self.partial(operands, place, first_place)
        remaining = iter(operands[partial.leading :])
        stream_tensor = next(remaining)
        post_tensor = next(remaining) if c.post_weight != "none" else None
        alpha_tensor = next(remaining) if c.alpha_tensor else None
        beta_tensor = next(remaining)
        next_tensor = next(remaining) if c.next_has_weight else None
        out_tensor = next(remaining)
        exchange = (ExchangeByCta if by_cta else Exchange)(c, place)

        # Weights and gates are constant over a step, so they travel while the previous grid finishes. Without a wait
        # the partial sum goes first: everything else is needed only after its reduction.
        stream_address = place.rows(stream_tensor, bf16=False)
        partial.load_early()
        if not c.enable_pdl:
            partial.load()
            stream_words = place.load(stream_address, bf16=False)
        post_words = place.vector(post_tensor, bf16=True)
        first_post_words = first_place.vector(post_tensor, bf16=True) if first_place is not None else None
        alpha_words, beta_words = place.gate(alpha_tensor), place.gate(beta_tensor)
        next_words = place.vector(next_tensor, bf16=True)
        exchange.open()
        if c.enable_pdl:
            if not self.wait_last:
                cute.arch.griddepcontrol_wait()
            if c.release_early:
                cute.arch.griddepcontrol_launch_dependents()
            partial.load()
            stream_words = place.load(stream_address, bf16=False)
        partial.publish()
        exchange.join()

        post_gain = self.gain(post_words, c.post_gain_center)
        next_gain = self.gain(next_words, c.next_gain_center)
        alpha = place.spread(alpha_words) if c.alpha_tensor else [Float32(c.alpha)] * WIDTH
        beta = place.spread(beta_words)
        stream = stream_words.fp32()

        partial_words, first_words = partial.words()
        x = self.branch(partial_words, post_gain)
        if first_words is None:
            first_x = x
        else:
            first_x = self.branch(first_words, self.gain(first_post_words, c.post_gain_center))
        exchange.send(0, _squares(self.first_order, first_x, packed=self.packed))
        partial.taken()
        scale = self.scale(exchange.receive(0), c.post_eps)
        new = self.blend(x, scale, post_gain, stream, alpha, beta)

        z = self.mul(new, next_gain) if c.next_weight_before else new
        exchange.send(1, _squares(self.second_order, z, packed=self.packed))
        partial.taken_by_all()
        place.store(stream_address, new, bf16=False)
        out = self.mul(z, [self.scale(exchange.receive(1), c.next_eps)] * WIDTH)
        if c.next_has_weight and not c.next_weight_before:
            out = self.mul(out, next_gain)
        out_bf16 = c.out_dtype == "bf16"
        place.store(place.rows(out_tensor, bf16=out_bf16), out, bf16=out_bf16)
        if self.wait_last:
            cute.arch.griddepcontrol_wait()

    def partial(self, operands: tuple[Any, ...], place: Place, first_place: Place | None) -> Partial:
        """Where the partial sum comes from."""
        return Partial(operands, place, first_place)

    def branch(self, words: memory.Words, gain: F32) -> F32:
        x = words.fp32()
        return self.mul(x, gain) if self.constants.post_weight == "before" else x

    def mul(self, a: F32, b: F32) -> F32:
        return exact.mul_all(a, b, packed=self.packed)

    def gain(self, words: memory.Words | None, center: float) -> F32:
        """rn(weight + center). Kept for a center of 0.0 too: it turns a weight of -0.0 into +0.0, as stock does."""
        if words is None:
            return []
        return exact.add_all(words.fp32(), [Float32(center)] * WIDTH, packed=self.packed)

    def scale(self, total: Float32, eps: float) -> Float32:
        """rsqrt(mean square + eps), the mean's 1 / hidden rounded to FP32 (exact for powers of two) and one FMA."""
        return exact.rsqrt(exact.fma(total, Float32(1.0 / self.constants.hidden), Float32(eps)))

    def blend(self, x: F32, scale: Float32, post_gain: F32, stream: F32, alpha: F32, beta: F32) -> F32:
        """The new stream: alpha * stream + beta * x * scale (* gain), with the roundings of the order.

        Triton fuses alpha * stream with the addition, on every architecture. FlashInfer multiplies beta and x first,
        and the assembler fuses its addition with the multiplication that comes last in the source: by the scale, but
        by alpha where alpha is a number other than 1.0 (read from its SASS for sm_100a and sm_103a).
        """
        scales = [scale] * WIDTH
        if self.constants.order == "flashinfer-0.7":
            branch = self.mul(beta, x)
            if self.constants.alpha_tensor:
                return exact.fma_all(branch, scales, self.mul(alpha, stream), packed=self.packed)
            if self.constants.alpha == 1.0:
                return exact.fma_all(branch, scales, stream, packed=self.packed)
            return exact.fma_all(stream, alpha, self.mul(branch, scales), packed=self.packed)
        y = self.mul(x, scales)
        if self.constants.post_weight == "after":
            y = self.mul(y, post_gain)
        y = self.mul(y, beta)
        if not self.constants.alpha_tensor and self.constants.alpha == 1.0:
            return exact.add_all(stream, y, packed=self.packed)  # the same rounding, and what an FMA by 1.0 becomes
        return exact.fma_all(stream, alpha, y, packed=self.packed)


# The order of a thread's own sum of squares


def _squares(order: str, x: F32, *, packed: bool) -> Float32:
    """The thread's sum of squares of its 8 columns, in an order that `_orders` chose."""
    if order == "pairwise":
        return reduction.squares_pairwise(x)
    if order == "two_lanes":
        return reduction.squares_two_lanes(x, packed=packed)
    if order == "two_lanes_fused":
        return reduction.squares_two_lanes_fused(x, packed=packed)
    if order == "chain_in_order":
        return reduction.squares_chain([x[1], x[0], *x[2:]])  # starts with rn(x0^2), then x1, x2, ...
    rounded = {"chain": (), "chain_rounding_odd": (3, 5, 7), "chain_rounding_middle": (4, 5)}[order]
    total = exact.fma(x[0], x[0], exact.mul(x[1], x[1]))
    for k in range(2, len(x)):
        square_apart = k in rounded
        total = exact.add(total, exact.mul(x[k], x[k])) if square_apart else exact.fma(x[k], x[k], total)
    return total


def _orders(constants: DualNormConstants, arch: str) -> tuple[str, str]:
    """How stock sums the squares of the partial sum and those of the new stream. Across lanes and warps all agree.

    Read from the PTX and SASS of every combination of flags, at hidden 8192 and one row per CTA (from 256 rows on,
    stock gives a CTA two on sm_100 exactly, and sums in yet another way; such steps are not what this kernel is for):
    - "chain_in_order": FlashInfer, one FMA after the other in column order.
    - "pairwise": Triton 3.8.0, sm_90.
    - "chain": Triton 3.6.0, sm_90; on sm_120, too, where the assembler fuses what the PTX has apart.
    - "two_lanes_fused": Triton 3.8.0 on sm_120, again through the assembler.
    - On sm_100 and sm_103 what is fused depends on whether the vectoriser saw packed operands before the squares
      (it then packs them, and fuses) or packs only the additions (whose scalar squares nothing can fuse).
    """
    c = constants
    if c.order == "flashinfer-0.7":
        return "chain_in_order", "chain_in_order"
    if c.order == "triton-3.6":
        return _orders_36(c) if arch in ("sm_100a", "sm_103a") else ("chain", "chain")
    if arch in ("sm_100a", "sm_103a"):
        return _orders_38(c)
    order = "pairwise" if arch == "sm_90a" else "two_lanes_fused"
    return order, order


def _orders_38(c: DualNormConstants) -> tuple[str, str]:
    """Triton 3.8.0, sm_100 and sm_103."""
    bf16 = c.out_dtype == "bf16"
    vectors = c.gate == "channel" and c.alpha_tensor
    weightless = not c.next_has_weight
    number = c.gate == "channel" and not c.alpha_tensor and bf16
    first = c.post_weight == "before"
    first |= vectors and (bf16 or c.next_weight_before)
    first |= number and c.post_weight == "after" and not c.next_weight_before
    second = vectors if c.next_weight_before else not bf16
    second |= number and c.post_weight != "none" and weightless
    names = {True: "two_lanes_fused", False: "two_lanes"}
    return names[first], names[second]


def _orders_36(c: DualNormConstants) -> tuple[str, str]:
    """Triton 3.6.0, sm_100 and sm_103: some squares are rounded by themselves and then added."""
    bf16 = c.out_dtype == "bf16"
    vectors = c.gate == "channel" and c.alpha_tensor
    number = c.gate == "channel" and not c.alpha_tensor and bf16
    if number and c.post_weight != "none" and c.next_has_weight:
        return "chain_rounding_middle", "chain_rounding_middle"
    second_apart = vectors if bf16 else c.next_weight_before
    return "chain_rounding_odd", "chain_rounding_odd" if second_apart else "chain"
