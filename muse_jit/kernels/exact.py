"""FP32 operations that the compiler may not change, as the PTX instructions they are.

A plain `a * b + c` reaches the assembler as `mul.f32` and `add.f32`, which it may fuse into one rounding, and on some
architectures it does. Where the bits of a result are a contract, each rounding must be one instruction with its
rounding mode written out: the assembler neither fuses nor reorders `mul.rn`, `add.rn` and `fma.rn`. The functions here
are traced inside kernels; the asm has no side effects, so an unused result costs nothing.

Vectors are plain Python lists of scalars. `packed` asks for the two-lane FP32 instructions of sm_100 and sm_103, which
round each lane as the scalar ones do and only halve the instruction count; a list of odd length stays scalar.
"""

from typing import Any

from cutlass import Float32, Int32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T

F32 = list[Float32]

PACKED_ARCHS = ("sm_100a", "sm_103a")
"""Where f32x2 arithmetic exists in hardware; sm_120 takes the PTX too, but only to split it."""


def asm(result: Any, operands: list[Any], text: str, constraints: str, *, side_effects: bool = False) -> Any:
    """One inline-assembly statement. Statements with side effects keep their order among themselves."""
    return llvm.inline_asm(
        result,
        [value.ir_value() for value in operands],
        text,
        constraints,
        has_side_effects=side_effects,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )


def statement(text: str, constraints: str, *operands: Any) -> None:
    """One inline-assembly statement without a result."""
    asm(None, list(operands), text, constraints, side_effects=True)


def unpack(struct: Any, count: int, kind: Any, wrap: Any) -> list[Any]:
    """The members of what a statement with several outputs returned."""
    return [wrap(llvm.extractvalue(kind, struct, [i])) for i in range(count)]


def struct_type(members: list[Any]) -> Any:
    return llvm.StructType.get_literal(members)


def mul(a: Float32, b: Float32) -> Float32:
    return Float32(asm(T.f32(), [a, b], "mul.rn.f32 $0, $1, $2;", "=f,f,f"))


def add(a: Float32, b: Float32) -> Float32:
    return Float32(asm(T.f32(), [a, b], "add.rn.f32 $0, $1, $2;", "=f,f,f"))


def add_flushed(a: Float32, b: Float32) -> Float32:
    """rn(a + b) with subnormal operands and results as zeros of their sign."""
    return Float32(asm(T.f32(), [a, b], "add.rn.ftz.f32 $0, $1, $2;", "=f,f,f"))


def fma(a: Float32, b: Float32, c: Float32) -> Float32:
    return Float32(asm(T.f32(), [a, b, c], "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f"))


def rsqrt(a: Float32) -> Float32:
    """The hardware's approximation, as stock uses it: one MUFU, subnormal operands count as zero."""
    return Float32(asm(T.f32(), [a], "rsqrt.approx.ftz.f32 $0, $1;", "=f,f"))


def _packed_pair(instruction: str, operands: F32) -> F32:
    """One two-lane instruction; operands are (low, high) of each source, in order."""
    sources = len(operands) // 2
    moves = "".join(f"mov.b64 s{i}, {{${2 + 2 * i}, ${3 + 2 * i}}}; " for i in range(sources))
    registers = ", ".join(f"s{i}" for i in range(sources))
    text = f"{{ .reg .b64 d, {registers}; {moves}{instruction} d, {registers}; mov.b64 {{$0, $1}}, d; }}"
    struct = asm(struct_type([T.f32(), T.f32()]), operands, text, "=f,=f" + ",f" * len(operands))
    return unpack(struct, 2, T.f32(), Float32)


def mul_all(a: F32, b: F32, *, packed: bool) -> F32:
    """rn(a[i] * b[i]) for every i."""
    if packed and len(a) % 2 == 0:
        pairs = range(0, len(a), 2)
        return [v for i in pairs for v in _packed_pair("mul.rn.f32x2", [a[i], a[i + 1], b[i], b[i + 1]])]
    return [mul(x, y) for x, y in zip(a, b, strict=True)]


def add_all(a: F32, b: F32, *, packed: bool) -> F32:
    """rn(a[i] + b[i]) for every i."""
    if packed and len(a) % 2 == 0:
        pairs = range(0, len(a), 2)
        return [v for i in pairs for v in _packed_pair("add.rn.f32x2", [a[i], a[i + 1], b[i], b[i + 1]])]
    return [add(x, y) for x, y in zip(a, b, strict=True)]


def fma_all(a: F32, b: F32, c: F32, *, packed: bool) -> F32:
    """rn(a[i] * b[i] + c[i]) for every i."""
    if packed and len(a) % 2 == 0:
        pairs = range(0, len(a), 2)
        operands = [[a[i], a[i + 1], b[i], b[i + 1], c[i], c[i + 1]] for i in pairs]
        return [v for pair in operands for v in _packed_pair("fma.rn.f32x2", pair)]
    return [fma(x, y, z) for x, y, z in zip(a, b, c, strict=True)]


def bf16_to_fp32(word: Int32) -> F32:
    """The two BF16 values of a 32-bit word, widened (exact): one integer instruction each."""
    bits = (word << Int32(16), word & Int32(-65536))
    return [Float32(llvm.bitcast(T.f32(), half.ir_value())) for half in bits]


def fp32_from_bits(word: Int32) -> Float32:
    return Float32(llvm.bitcast(T.f32(), word.ir_value()))


def fp32_to_bits(value: Float32) -> Int32:
    return Int32(llvm.bitcast(T.i32(), value.ir_value()))


def select(condition: Int32, yes: Int32, no: Int32) -> Int32:
    """yes where the condition is not 0, else no: one SEL."""
    text = "{ .reg .pred p; setp.ne.s32 p, $1, 0; selp.b32 $0, $2, $3, p; }"
    return Int32(asm(T.i32(), [condition, yes, no], text, "=r,r,r,r"))


def fp32_to_bf16(low: Float32, high: Float32) -> Int32:
    """Two FP32 values rounded to nearest even BF16, in one 32-bit word."""
    return Int32(asm(T.i32(), [high, low], "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f"))
