"""A Lamport mailbox, device side: ranks hand each other rows of BF16, and the data itself says that it has arrived.

Every rank has a buffer [3 generations][tp ranks][capacity rows][width] of BF16 that all ranks can store to. Armed, each
32-bit word of it is the sentinel, two BF16 -0; published words never are, since a publisher makes every -0 a +0, as
stock's all-reduces do. So a reader polls a slot until no word of it is the sentinel: no flag, no fence, no second
trip. Vector stores arrive whole only word by word, hence every word is tested; and tested as integers, since a
comparison of floats flushes subnormals. A reader re-arms what it has read.

Generations. Each rank keeps, in memory of its own, one generation for each row: `state[row]`, 0, 1 or 2. Step s of a
row (the s-th time that it is summed) uses generation s mod 3. Publisher and consumer of the row read it, and the
consumer advances it once all its threads have their data. No counter of a whole grid is needed, since nothing
connects rows; and as all ranks run the same steps with the same rows, their generations agree without being exchanged.

Why nothing is overwritten or lost. Write P(s) and C(s) for a rank's publishing and consuming of step s of a row.

1. A rank's own order. C(s) ends before P(s + 1) begins, because the kernel of P waits for the preceding grids
   (griddepcontrol.wait waits for the whole previous grid and the visibility of its stores; that one waited, too,
   before it ended, and so on). For the same reason the generation is read after that wait wherever the previous grid
   may be a consumer. With an early release the next grid only starts earlier: it still waits.
2. A slot is not overwritten before it was read and re-armed. Rank p stores P(s + 3) into slots of rank q that q used
   in C(s). p is past C(s + 2), so it has q's P(s + 2), which q began after its C(s + 1) and C(s) had ended, re-arming
   included. Two generations would do: p is past C(s + 1), so it has q's P(s + 1), begun after C(s) had ended. The
   third is slack of one step: a publisher need not wait for its predecessor's re-arming, only for the one before
   (tests/kernels/test_mailbox_protocol.py goes through every interleaving of a few steps).
3. A slot is not read as new before it is new. C(s) finds in its slots what C(s - 3) of the same rank left there, the
   sentinel, or what P(s) stored. Polling loads are relaxed at system scope, so they read the L2 cache, where stores
   of peers arrive, and never a line that the L1 cache kept.
4. The generation changes for nobody who still needs it. Who advances it has received the sum of the whole row, to
   which each thread contributed after its slots were complete.
5. A consumer that runs after a publishing kernel may read its generation before its own wait: it is started at the
   earliest when all of the publisher released it, and a publisher releases after its wait, that is after the last
   consumer has ended. Directly behind its publisher the same holds for all that the boundary reads and writes
   (`wait_last`): nothing but the publisher can still be running, and that has read all its inputs once all its outputs
   are here.

The watchdog. Polling ends after `timeout_s`, measured by %globaltimer, which is asked once in 256 polls. Who gives up
writes what it misses into `status` (the first one does), makes the generation of every row FAILED, and goes on with a
NaN, which the sum spreads over the row: outputs are NaN, no kernel hangs or traps, no other memory is touched. While
a row's generation is FAILED its kernels publish nothing, read nothing, and give NaN at once. So ranks that a slow one
left behind cannot go on with data of different steps: they all stop, each after its time. Only `reset` ends that.
"""

from typing import Any

from cutlass import Int32, Int64
from cutlass.cutlass_dsl import T

from muse_jit.constants.mailbox import FAILED, GENERATIONS, REPORTED, SENTINEL, Shape
from muse_jit.kernels import exact

POLLS = 256
"""Polls between two looks at the clock; a power of two."""
NAN_WORD = 0x7FFF7FFF

Words = list[Int32]


def canonical(word: Int32) -> Int32:
    """Two BF16 values, each -0 made +0: never the sentinel. Adding 0x7fff to what is below a sign sets the sign's
    place exactly where that is not zero."""
    nonzero = (word & Int32(0x7FFF7FFF)) + Int32(0x7FFF7FFF)
    return word ^ (word & (nonzero ^ Int32(-1)) & Int32(SENTINEL))


class Mailbox:
    """The run-time operands of a mailbox in a kernel.

    Args:
        shape: as compiled.
        table: int64 [tp + 2]: addresses of the buffers of this rank, the next one and so on, cyclically, as this
            device sees them; this rank's number; the multicast address of all buffers, or 0.
        state: int32 [capacity], the generations.
    """

    def __init__(self, shape: Shape, table: Any, state: Any) -> None:
        self.shape = shape
        self.table: Int64 = table.iterator.toint()
        self.state: Int64 = state.iterator.toint()

    def open(self) -> None:
        """Load the table; it is constant, so before any wait."""
        tp = self.shape.tp
        entries = [Int64(_load(self.table, 8 * i, "b64", T.i64(), "=l,l")) for i in range(tp + 2)]
        self.buffers, self.multicast = entries[:tp], entries[tp + 1]
        self.rank = Int32(entries[tp])

    def generation(self, row: Int64) -> Int32:
        """This rank's generation of a row, or FAILED. See points 1 and 5 above for when it may be asked."""
        address = self.state + row * Int64(4)
        return Int32(_load(address, 0, "b32", T.i32(), "=r,l", "relaxed.gpu."))

    def offset(self, generation: Int32, rank: Int32, row: Int64, column: Int32) -> Int64:
        """Of an element from the start of a buffer, in bytes."""
        slots = Int64(generation * Int32(self.shape.tp) + rank) * Int64(self.shape.rank_bytes)
        return slots + row * Int64(2 * self.shape.width) + Int64(column) * Int64(2)

    def publish(
        self,
        words: Words,
        generation: Int32,
        row: Int64,
        column: Int32,
        *,
        own: bool,
        inside: Int32 | None = None,
    ) -> None:
        """Store neighbouring columns, 4 words or 2 or 1, to this rank's slot of every rank; `own`: of itself, too.

        The words are `canonical`, the address is aligned to their size. Nothing is stored when the row has FAILED, nor
        where `inside` is 0. A consumer that a kernel publishes for needs `own`.
        """
        offset = self.offset(generation, self.rank, row, column)
        if self.shape.transport == "multicast":
            vector = f".v{len(words)}.f32" if len(words) > 1 else ".f32"
            _store(f"multimem.st.relaxed.sys.global{vector}", self.multicast + offset, words, generation, inside)
            return
        vector = f".v{len(words)}.b32" if len(words) > 1 else ".b32"
        for buffer in self.buffers[1:] + self.buffers[:1] * own:
            _store(f"st.relaxed.sys.global{vector}", buffer + offset, words, generation, inside)

    def rearm(self, generation: Int32, row: Int64, column: Int32, *, own: bool) -> None:
        """Make 16 bytes of every rank's slot the sentinel; `own`: of this rank's, too. After they were read."""
        address = self.buffers[0] + self.offset(generation, Int32(0), row, column)
        sentinel = [Int32(SENTINEL)] * 4
        for rank in range(self.shape.tp):
            others = None if own else self.rank ^ Int32(rank)
            place = address + Int64(rank * self.shape.rank_bytes)
            _store("st.relaxed.sys.global.v4.b32", place, sentinel, generation, others)

    def advance(self, generation: Int32, row: Int64, chosen: Int32) -> None:
        """The row's next generation, by the one thread for which `chosen` is 0. It stays FAILED if it became that."""
        text = (
            "{ .reg .pred p, q; .reg .b32 next, old; setp.eq.s32 p, $2, 0; setp.ge.and.s32 p, $1, 0, p; "
            f"add.s32 next, $1, 1; setp.eq.s32 q, next, {GENERATIONS}; selp.b32 next, 0, next, q; "
            "@p atom.relaxed.gpu.global.cas.b32 old, [$0], $1, next; }"
        )
        exact.asm(None, [self.state + row * Int64(4), generation, chosen], text, "l,r,r", side_effects=True)

    def poll(
        self, generation: Int32, row: Int64, column: Int32, own: Words | None, status: Any, timeout_s: float
    ) -> tuple[list[Words], Int32]:
        """16 bytes of every rank, by rank, when all have come, and 0; or after the timeout anything, and 1.

        All ranks' loads are issued before the first is looked at, and again for those that are not complete. `own`:
        this rank's words, which then are not read. `status`: int32 [1], where a failure is reported.
        """
        tp = self.shape.tp
        address = self.buffers[0] + self.offset(generation, Int32(0), row, column)
        inputs = [address, generation, self.state, status.iterator.toint(), Int32(row)]
        inputs += [] if own is None else [self.rank, *own]
        constraints = "=&r," * (4 * tp + 1) + "l,r,l,l,r" + ",r" * (len(inputs) - 5)
        text = _poll_text(self.shape, own is not None, round(timeout_s * 1e9))
        kinds = [T.i32()] * (4 * tp + 1)
        result = exact.asm(exact.struct_type(kinds), inputs, text, constraints, side_effects=True)
        words = exact.unpack(result, 4 * tp + 1, T.i32(), Int32)
        return [words[4 * rank : 4 * rank + 4] for rank in range(tp)], words[-1]


def _load(address: Int64, offset: int, kind: str, result: Any, constraints: str, order: str = "") -> Any:
    return exact.asm(result, [address], f"ld.{order}global.{kind} $0, [$1+{offset}];", constraints, side_effects=True)


def _store(operation: str, address: Int64, words: Words, generation: Int32, where: Int32 | None) -> None:
    """A store where the generation is one, and `where` is not 0."""
    count = len(words)
    names = ", ".join(f"${i + 1}" for i in range(count))
    names = f"{{{names}}}" if count > 1 else names
    also = "" if where is None else f"setp.ne.and.s32 p, ${count + 2}, 0, p; "
    text = f"{{ .reg .pred p; setp.ge.s32 p, ${count + 1}, 0; {also}@p {operation} [$0], {names}; }}"
    operands = [address, *words, generation, *([] if where is None else [where])]
    exact.asm(None, operands, text, "l" + ",r" * (len(operands) - 1), side_effects=True)


def _poll_text(shape: Shape, own: bool, timeout_ns: int) -> str:
    """The polling loop of a thread, in which lanes of a warp go on independently until each has its data."""
    tp, failed = shape.tp, f"${4 * shape.tp}"
    slot, generation, state, status, row, rank = (f"${4 * tp + i}" for i in range(1, 7))
    words = [[f"${4 * p + i}" for i in range(4)] for p in range(tp)]
    loads = [
        f"ld.relaxed.sys.global.v4.b32 {{{', '.join(words[p])}}}, [{slot}+{p * shape.rank_bytes}];" for p in range(tp)
    ]
    lines = [
        "{ .reg .pred mine, any, rare, " + ", ".join(f"dirty{p}" for p in range(tp)) + ";",
        ".reg .b32 polls, seen, row; .reg .b64 now, end, place;",
        f"mov.b32 {failed}, 0; mov.b32 polls, 0; setp.lt.s32 rare, {generation}, 0;",
        f"@rare mov.b32 {failed}, 1; @rare bra done_${{:uid}};",
    ]
    for p in range(tp):
        if own:
            lines.append(f"setp.eq.s32 mine, {rank}, {p}; @!mine {loads[p]}")
            lines += [f"@mine mov.b32 {word}, ${4 * tp + 7 + i};" for i, word in enumerate(words[p])]
        else:
            lines.append(loads[p])
    lines.append("again_${:uid}:")
    for p in range(tp):
        lines.append(f"setp.eq.s32 dirty{p}, {words[p][0]}, {SENTINEL};")
        lines += [f"setp.eq.or.s32 dirty{p}, {word}, {SENTINEL}, dirty{p};" for word in words[p][1:]]
    lines.append("or.pred any, dirty0, dirty1;")
    lines += [f"or.pred any, any, dirty{p};" for p in range(2, tp)]
    lines += [
        "@!any bra done_${:uid};",
        f"add.s32 polls, polls, 1; and.b32 seen, polls, {POLLS - 1}; setp.eq.s32 rare, seen, 0;",
        "@rare bra clock_${:uid};",
        "more_${:uid}:",
        *(f"@dirty{p} {load}" for p, load in enumerate(loads)),
        "bra again_${:uid};",
        # Time runs from the first look, some tenths of a millisecond after the first poll.
        "clock_${:uid}:",
        f"mov.u64 now, %globaltimer; setp.eq.s32 rare, polls, {POLLS}; @rare add.s64 end, now, {timeout_ns};",
        # Another thread of this rank may have given up: one wait is enough for a rank.
        f"mul.wide.s32 place, {row}, 4; add.s64 place, place, {state}; ld.relaxed.gpu.global.b32 seen, [place];",
        "setp.lt.s32 rare, seen, 0; setp.ge.or.u64 rare, now, end, rare; @!rare bra more_${:uid};",
        f"mov.b32 {failed}, 1; mov.b32 seen, {tp - 1};",
        *(f"@dirty{p} mov.b32 seen, {p};" for p in reversed(range(tp))),
        f"shl.b32 seen, seen, 16; or.b32 seen, seen, {row}; shl.b32 polls, {generation}, 24;",
        f"or.b32 seen, seen, polls; or.b32 seen, seen, {REPORTED};",
        f"atom.relaxed.gpu.global.cas.b32 seen, [{status}], 0, seen;",
        f"mov.b32 row, 0; mov.b64 place, {state};",
        "fail_${:uid}:",
        f"st.relaxed.gpu.global.b32 [place], {FAILED}; add.s64 place, place, 4; add.s32 row, row, 1;",
        f"setp.lt.s32 rare, row, {shape.capacity}; @rare bra fail_${{:uid}};",
        # Who advances the generation of this row must find it failed.
        "fence.acq_rel.gpu;",
        # Lanes that went round a different number of times are one warp again: what follows shuffles.
        "done_${:uid}: bar.warp.sync -1; }",
    ]
    return "\n".join(lines)
