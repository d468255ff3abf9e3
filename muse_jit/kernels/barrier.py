"""mbarriers in shared memory: how a thread learns that bytes it did not move have arrived. Addresses are 32-bit, of
the block's own shared memory; offsets are known at compile time."""

from cutlass import Int32

from muse_jit.kernels import exact


def init(barriers: Int32, counts: dict[int, int], thread: Int32) -> None:
    """Thread 0 initialises the mbarriers at these offsets for so many arrivals, and makes them known to the cluster's
    blocks and to the copy engine. The others have to be told by a barrier."""
    inits = "".join(f"@p mbarrier.init.shared::cta.b64 [$0+{offset}], {count}; " for offset, count in counts.items())
    text = f"{{ .reg .pred p; setp.eq.s32 p, $1, 0; {inits}}}"
    exact.statement(text, "r,r", barriers, thread)
    exact.statement("fence.mbarrier_init.release.cluster;", "")


def expect(barriers: Int32, offset: int, size: int, thread: Int32) -> None:
    """Thread 0 arrives and announces `size` bytes."""
    arrive = f"@p mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0+{offset}], {size};"
    exact.statement(f"{{ .reg .pred p; setp.eq.s32 p, $1, 0; {arrive} }}", "r,r", barriers, thread)


def wait(barriers: Int32, offset: int, parity: int) -> None:
    """Until the phase of this parity is complete. What copies have written is then visible."""
    attempt = f"mbarrier.try_wait.parity.shared::cta.b64 p, [$0+{offset}], {parity};"
    exact.statement(f"{{ .reg .pred p; wait_${{:uid}}: {attempt} @!p bra wait_${{:uid}}; }}", "r", barriers)
