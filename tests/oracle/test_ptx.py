"""The interpreter runs what it knows and refuses the rest: a few lines of PTX each."""

import numpy as np
import pytest

from oracle import ptx

ENTRY = """
.version 9.0
.target sm_90a
.visible .entry k(.param .u64 k_0, .param .u64 k_1)
.reqntid 64, 1, 1
{
    .reg .pred %p<4>;
    .reg .b32 %r<16>;
    .reg .b64 %rd<8>;
    .shared .align 16 .b8 buffer[256];
    ld.param.b64 %rd1, [k_0];
    ld.param.b64 %rd2, [k_1];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd3, %r1, 4;
    add.s64 %rd4, %rd1, %rd3;
    add.s64 %rd5, %rd2, %rd3;
    shl.b32 %r2, %r1, 2;
    mov.b32 %r3, buffer;
    add.s32 %r4, %r3, %r2;
    ld.global.b32 %r5, [%rd4+0];
BODY
    ret;
}
"""


def run(body: str, ctas: int = 1) -> np.ndarray:
    source, result = np.arange(1, 65, dtype=np.float32), np.zeros(64, np.float32)
    ptx.run(ptx.Kernel(ENTRY.replace("BODY", body)), [source, result], ctas)
    return result


def test_butterfly_and_scopes() -> None:
    body = """
    shfl.sync.bfly.b32 %r6, %r5, 1, 31, -1;
    { .reg .pred p; setp.lt.s32 p, %r1, 32; mov.b32 %r7, 0; @p add.rn.f32 %r7, %r5, %r6; }
    st.global.b32 [%rd5+0], %r7;"""
    expected = [float(2 * (i - i % 2) + 3) if i < 32 else 0.0 for i in range(64)]
    assert run(body).tolist() == expected


def test_packed_lanes() -> None:
    body = """
    mov.b32 %r6, 0f3F800000;
    { .reg .b64 d, s; mov.b64 s, {%r5, %r6}; fma.rn.f32x2 d, s, s, s; mov.b64 {%r7, %r8}, d; }
    add.rn.f32 %r9, %r7, %r8;
    st.global.b32 [%rd5+0], %r9;"""
    assert run(body).tolist() == [float(i * i + i + 2) for i in range(1, 65)]


def test_uniform_branch() -> None:
    body = """
    setp.ge.s32 %p1, %r1, 0;
    mov.b32 %r6, %r5;
    @%p1 bra $L1;
    mov.b32 %r6, 0;
$L1:
    st.global.b32 [%rd5], %r6;"""
    assert run(body).tolist() == [float(i) for i in range(1, 65)]


EXCHANGE = "st.shared.b32 [%r4], %r5; {} xor.b32 %r6, %r4, 128; ld.shared.b32 %r7, [%r6]; st.global.b32 [%rd5], %r7;"


def test_exchange_between_warps() -> None:
    assert run(EXCHANGE.format("bar.sync 0;")).tolist() == [float((i ^ 32) + 1) for i in range(64)]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (EXCHANGE.format(""), "without a barrier"),
        ("st.shared.b32 [%r3], %r5;", "different values"),
        ("st.global.b32 [%rd5+4], %r5;", "outside"),
        ("ld.global.v4.b32 {%r6, %r7, %r8, %r9}, [%rd4];", "misaligned"),
        ("ld.local.b32 %r6, [%r4];", "unknown access"),
        ("sin.approx.f32 %r6, %r5;", "unknown instruction"),
        ("add.rz.f32 %r6, %r5, %r5;", "unknown instruction"),
        ("mul.ftz.f32 %r6, %r5, %r5;", "unknown instruction"),
        ("fma.rn.f32 %r77, %r5, %r5, %r5;", "unknown register"),
        ("setp.lt.s32 %p1, %r1, 7; @%p1 bra $L1; $L1:", "not uniform"),
    ],
)  # fmt: skip
def test_refuses(body: str, message: str) -> None:
    with pytest.raises(ptx.PtxError, match=message):
        run(body)
