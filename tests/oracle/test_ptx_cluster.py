"""Two CTAs tell each other their first thread's value; every rule that they break is found."""

import numpy as np
import pytest

from oracle import ptx

ENTRY = """
.version 9.0
.target sm_90a
.visible .entry k(.param .u64 k_0, .param .u64 k_1)
.reqntid 32, 1, 1
{
    .reg .pred %p<4>;
    .reg .b32 %r<16>;
    .reg .b64 %rd<8>;
    .shared .align 16 .b8 buffer[32];
    ld.param.b64 %rd1, [k_0];
    ld.param.b64 %rd2, [k_1];
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, %ctaid.x;
    and.b32 %r3, %r2, 1;
    mul.wide.u32 %rd3, %r2, 4;
    add.s64 %rd4, %rd1, %rd3;
    add.s64 %rd5, %rd2, %rd3;
    ld.global.b32 %r5, [%rd4+0];
    mov.b32 %r4, buffer;
    shl.b32 %r6, %r3, 2;
    setp.eq.s32 %p1, %r1, 0;
    setp.lt.u32 %p2, %r1, 2;
    mapa.shared::cluster.u32 %r7, %r4, %r1;
    add.s32 %r8, %r7, %r6;
BODY
    ret;
}
"""
INIT = "@%p1 mbarrier.init.shared::cta.b64 [%r4+16], 1;"
EXPECT = "@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r4+16], 8;"
FENCE = "fence.mbarrier_init.release.cluster;"
ARRIVE = "barrier.cluster.arrive.relaxed.aligned;"
JOIN = "barrier.cluster.wait.acquire.aligned;"
SEND = "@%p2 st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r8+0], %r5, [%r7+16];"
WAIT = "{ .reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [%r4+16], 0; @!p bra again; }"
READ = "ld.shared.v2.b32 {%r9, %r10}, [%r4]; add.rn.f32 %r11, %r9, %r10; st.global.b32 [%rd5], %r11;"
WHOLE = [INIT, EXPECT, FENCE, ARRIVE, JOIN, SEND, WAIT, READ]


def run(parts: list[str], ctas: int = 4) -> np.ndarray:
    source, result = np.arange(1, ctas + 1, dtype=np.float32), np.zeros(ctas, np.float32)
    ptx.run(ptx.Kernel(ENTRY.replace("BODY", "\n".join(parts)), cluster=2), [source, result], ctas)
    return result


def without(part: str) -> list[str]:
    return [p for p in WHOLE if p is not part]


def test_each_cluster_exchanges_by_itself() -> None:
    assert run(WHOLE).tolist() == [3.0, 3.0, 7.0, 7.0]


def test_bytes_may_come_before_they_are_expected() -> None:
    assert run([INIT, FENCE, ARRIVE, JOIN, SEND, EXPECT, WAIT, READ]).tolist() == [3.0, 3.0, 7.0, 7.0]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (without(INIT), "never initialised"),
        (without(EXPECT), "never completes"),
        (without(FENCE), "without a fence"),
        (without(ARRIVE), "without an arrival"),
        (without(JOIN), "before a cluster barrier"),
        (without(SEND), "never completes"),
        (without(WAIT), "before the wait"),
        ([*WHOLE[:6]], "exits while"),
        ([*WHOLE[:4]], "between arrival and wait"),
        ([*WHOLE[:6], SEND, WAIT, READ], "may not have been read"),
        ([INIT, *WHOLE], "initialised twice"),
        ([*WHOLE, "st.shared.b32 [%r4+16], %r5;"], "of an mbarrier"),
        ([part.replace("%p1", "%p2") for part in WHOLE], "more or fewer than one thread"),
        ([part.replace("%p2 ", "%p1 ").replace("[%r7+16]", "[%r4+16]") for part in WHOLE], "outside of the cluster"),
        ([part.replace("@%p2 ", "") for part in WHOLE], "outside of the cluster"),
        ([part.replace("[%r8+0]", "[%r8+16]") for part in WHOLE], "over an mbarrier"),
        ([part.replace("[%r8+0]", "[%r7]") for part in WHOLE], "different values|may not have been read"),
        ([part.replace("aligned", "") for part in WHOLE], "unknown instruction"),
        ([part.replace(".b32 [%r8", ".u32 [%r8") for part in WHOLE], "unknown instruction"),
        ([part.replace(", 0; @!p", ", 1; @!p") for part in WHOLE], "unknown instruction"),
    ],
)  # fmt: skip
def test_refuses(parts: list[str], message: str) -> None:
    with pytest.raises(ptx.PtxError, match=message):
        run(parts)


def test_whole_clusters_only() -> None:
    with pytest.raises(ptx.PtxError, match="no whole clusters"):
        run(WHOLE, ctas=3)
