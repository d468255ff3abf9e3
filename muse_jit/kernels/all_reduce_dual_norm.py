"""Dual norm of a sum over the ranks: each publishes its partial sum, takes the others', and goes on as the dual norm.

One kernel, in which a thread owns the same 8 columns of a row from its partial sum to its output. It stores its 16
bytes to its slot at every other rank, polls theirs, adds them in stock's order, and is then where the dual norm is
when it has loaded its partial sum. So an all-reduce costs one way to the farthest rank and one poll, and no memory
between it and the norm. How the mailbox works, and why nothing in it is lost, is said in `kernels/mailbox.py`.

This rank's own part stays in registers, at its own place in the sum: every rank adds the same numbers in the same
order, so all ranks get the same bits.
"""

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.runtime import make_fake_compact_tensor

from muse_jit.constants.all_reduce_dual_norm import AllReduceDualNormConstants
from muse_jit.constants.dual_norm import WIDTH
from muse_jit.constants.mailbox import Shape
from muse_jit.kernels import build as building
from muse_jit.kernels import exact, memory
from muse_jit.kernels.dual_norm import BoundaryKernel, Partial, Place, boundary_operands
from muse_jit.kernels.exact import F32
from muse_jit.kernels.mailbox import NAN_WORD, Mailbox, Words, canonical

CHUNK = 8
"""Ranks whose sum stock's MNNVL all-reduce begins at +0; with 16 it adds two such sums."""


def build(constants: AllReduceDualNormConstants, target: building.Target, dump_dir: Any = None) -> Any:
    """Compile it for these constants.

    The result takes the dual norm's operands and then the mailbox's: table int64 [tp + 2], state int32 [capacity],
    status int32 [1] (see `kernels.mailbox`). Where the GEMM publishes (role "consume") the first operand is the
    stream, there is no partial sum. The publisher (role "publish") takes partial, table and state only.
    """
    c = constants
    c.validate_for(target.arch)
    first, *others = boundary_operands(c, building.symbolic_rows())
    table = make_fake_compact_tensor(cutlass.Int64, (c.tp + 2,), assumed_align=8)
    state = make_fake_compact_tensor(cutlass.Int32, (c.capacity,), assumed_align=4)
    status = make_fake_compact_tensor(cutlass.Int32, (1,), assumed_align=4)
    if c.role == "publish":
        return building.compile_for(target, _Publisher(c), first, table, state, dump_dir=dump_dir)
    operands = [*([first] if c.role == "both" else []), *others, table, state, status]
    return building.compile_for(target, _AllReduceKernel(c, target.arch), *operands, dump_dir=dump_dir)


def _mailbox(c: AllReduceDualNormConstants, table: Any, state: Any) -> Mailbox:
    return Mailbox(Shape(c.tp, c.capacity, c.hidden, c.transport), table, state)


class _AllReduceKernel(BoundaryKernel):
    """The dual norm whose partial sum is made of all ranks'."""

    def __init__(self, constants: AllReduceDualNormConstants, arch: str) -> None:
        super().__init__(constants, arch)
        self.all_reduce = constants
        self.wait_last = constants.wait_last

    def partial(self, operands: tuple[Any, ...], place: Place, first_place: Place | None) -> Partial:
        if self.all_reduce.role == "both":
            return _PublishedHere(self.all_reduce, operands, place)
        return _PublishedBefore(self.all_reduce, operands, place)


class _PublishedBefore(Partial):
    """The sum of what all ranks have published, this one included, in an earlier kernel."""

    leading = 0
    own = True
    """Whether this rank's part is read from its own slot, too."""

    def __init__(self, constants: AllReduceDualNormConstants, operands: tuple[Any, ...], place: Place) -> None:
        self.constants, self.place = constants, place
        table, state, self.status = operands[-3:]
        self.mailbox = _mailbox(constants, table, state)

    def load_early(self) -> None:
        self.mailbox.open()
        self.generation = self.mailbox.generation(self.place.row)  # safe ahead of the wait: point 5 in mailbox.py

    def load(self) -> None:
        pass

    def words(self) -> tuple[memory.Words, memory.Words | None]:
        return self.summed(None), None

    def summed(self, own: Words | None) -> memory.Words:
        c, place = self.constants, self.place
        ranks, failed = self.mailbox.poll(
            self.generation, place.row, place.column, own, self.status, float(c.timeout_s)
        )
        first, *others = stock_sum(ranks, c.sum_order)
        # Where a rank is missing, one NaN is enough: the row's sum has it, and everything is scaled by that.
        return memory.Words([exact.select(failed, Int32(NAN_WORD), first), *others], True)

    def taken(self) -> None:
        self.mailbox.rearm(self.generation, self.place.row, self.place.column, own=self.own)

    def taken_by_all(self) -> None:
        self.mailbox.advance(self.generation, self.place.row, self.place.column)


class _PublishedHere(_PublishedBefore):
    """The same where this kernel publishes this rank's part."""

    leading = 1

    def __init__(self, constants: AllReduceDualNormConstants, operands: tuple[Any, ...], place: Place) -> None:
        super().__init__(constants, operands, place)
        self.address = place.rows(operands[0], bf16=True)
        # A multicast store comes back to this rank as well, at some time: it must be awaited before it is re-armed.
        self.own = constants.transport == "multicast"

    def load_early(self) -> None:
        self.mailbox.open()

    def load(self) -> None:
        # The previous grid may be a boundary that advances the generation.
        self.loaded = self.place.load(self.address, bf16=True)
        self.generation = self.mailbox.generation(self.place.row)

    def publish(self) -> None:
        self.mine = [canonical(word) for word in self.loaded.words]
        self.mailbox.publish(self.mine, self.generation, self.place.row, self.place.column, own=False)

    def words(self) -> tuple[memory.Words, memory.Words | None]:
        return self.summed(None if self.own else self.mine), None


def stock_sum(ranks: list[Words], order: str) -> Words:
    """The ranks' words of two BF16 values, added up as stock's all-reduce does; `.ftz` because it is built so.

    "mnnvl" (FlashInfer's MNNVL all-reduce): from +0 through the ranks in FP32, rounded once. The +0 is an operation of
    its own: it flushes a subnormal of rank 0, and what it leaves is no -0.
    "node-local" (its trtllm all-reduce): through the ranks from rank 0, rounded to BF16 after every addition.
    """
    sums: Words = []
    for words in zip(*ranks, strict=True):
        values = [exact.bf16_to_fp32(word) for word in words]
        if order == "mnnvl":
            chunks = [values[i : i + CHUNK] for i in range(0, len(values), CHUNK)]
            low_high = _chain([_chain([[Float32(0.0)] * 2, *chunk]) for chunk in chunks])
            sums.append(exact.fp32_to_bf16(*low_high))
            continue
        total = words[0]
        for value in values[1:]:
            total = exact.fp32_to_bf16(*_chain([exact.bf16_to_fp32(total), value]))
        sums.append(total)
    return sums


def _chain(values: list[F32]) -> F32:
    first, *others = values
    for value in others:
        first = [exact.add_flushed(a, b) for a, b in zip(first, value, strict=True)]
    return first


class _Publisher:
    """Only the publishing: what the GEMM's epilogue does, from a partial sum in memory."""

    def __init__(self, constants: AllReduceDualNormConstants) -> None:
        self.constants = constants

    @cute.jit
    def __call__(self, partial: Any, table: Any, state: Any, stream: Any) -> None:
        c = self.constants
        self.kernel(partial, table, state).launch(
            grid=(Int32(cute.size(partial, mode=[0])) * c.ctas_per_row, 1, 1),
            block=(c.threads_per_cta, 1, 1),
            stream=stream,
            use_pdl=c.enable_pdl,
        )

    @cute.kernel
    def kernel(self, partial: Any, table: Any, state: Any) -> None:
        self.trace(partial, table, state)

    def trace(self, partial: Any, table: Any, state: Any) -> None:
        c = self.constants
        place, mailbox = Place(c, halves=False), _mailbox(c, table, state)
        address: Int64 = place.rows(partial, bf16=True)
        mailbox.open()
        if c.enable_pdl:
            cute.arch.griddepcontrol_wait()
            if c.release_early:  # after the wait: point 5 in mailbox.py
                cute.arch.griddepcontrol_launch_dependents()
        words = memory.load(address, 0, WIDTH, bf16=True).words
        generation = mailbox.generation(place.row)
        mailbox.publish([canonical(word) for word in words], generation, place.row, place.column, own=True)
