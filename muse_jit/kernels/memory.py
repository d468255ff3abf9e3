"""Vector loads and stores of a thread's consecutive elements, as FP32 lists.

A kernel gives byte addresses, so that one base register and constant offsets reach everything a thread owns. Loads are
statements with side effects: they are issued in the order they are written, before or after a grid dependency wait as
the kernel says. An `inside` of None means that no predicate is needed; else lanes outside read zeros and store nothing.
"""

from dataclasses import dataclass

from cutlass import Float32, Int32, Int64, cute
from cutlass.cutlass_dsl import T

from muse_jit.kernels import exact

VECTOR_BYTES = 16
"""The widest access that every target has."""


@dataclass(frozen=True)
class Words:
    """Raw 32-bit words as loaded; converting them later keeps all loads in flight together."""

    words: list[Int32]
    bf16: bool

    def fp32(self) -> list[Float32]:
        if self.bf16:
            return [value for word in self.words for value in exact.bf16_to_fp32(word)]
        return [exact.fp32_from_bits(word) for word in self.words]


def element_bytes(bf16: bool) -> int:
    return 2 if bf16 else 4


def _suffix(words: int) -> str:
    return f".v{words}.b32" if words > 1 else ".b32"


def _list(first: int, count: int) -> str:
    names = ", ".join(f"${first + i}" for i in range(count))
    return f"{{{names}}}" if count > 1 else names


def load(base: Int64, offset: int, elements: int, *, bf16: bool, inside: Int32 | None = None) -> Words:
    """`elements` consecutive values from global memory at base + offset, by the fewest vector loads."""
    total = elements * element_bytes(bf16) // 4
    words: list[Int32] = []
    while len(words) < total:
        count = min(VECTOR_BYTES // 4, total - len(words))
        words += _load_words(base, offset + 4 * len(words), count, inside)
    return Words(words, bf16)


def _load_words(base: Int64, offset: int, count: int, inside: Int32 | None) -> list[Int32]:
    struct_type = exact.struct_type([T.i32()] * count) if count > 1 else T.i32()
    operation = f"ld.global{_suffix(count)} {_list(0, count)}, [${count}+{offset}];"
    if inside is None:
        result = exact.asm(struct_type, [base], operation, "=r," * count + "l", side_effects=True)
    else:
        # The zeros are written before the address is used: early clobber keeps them out of its register.
        zeros = "".join(f"mov.b32 ${i}, 0; " for i in range(count))
        text = f"{{ .reg .pred p; setp.ne.s32 p, ${count + 1}, 0; {zeros}@p {operation} }}"
        result = exact.asm(struct_type, [base, inside], text, "=&r," * count + "l,r", side_effects=True)
    return exact.unpack(result, count, T.i32(), Int32) if count > 1 else [Int32(result)]


def evict_first() -> Int64:
    """The L2 cache policy for what is read once, such as weights: the first to go, it leaves the rest of the cache
    alone. Copies with it were faster themselves, too: benchmarks/notes.md."""
    return Int64(exact.asm(T.i64(), [], "createpolicy.fractional.L2::evict_first.b64 $0, 1.0;", "=l"))


def load_shared(address: Int32, offset: int, count: int = 4) -> list[Int32]:
    """`count` neighbouring words of shared memory, 2 or 4, by one instruction."""
    text = f"ld.shared.v{count}.b32 {_list(0, count)}, [${count}+{offset}];"
    result = exact.asm(exact.struct_type([T.i32()] * count), [address], text, "=r," * count + "r", side_effects=True)
    return exact.unpack(result, count, T.i32(), Int32)


def store(base: Int64, offset: int, values: list[Float32], *, bf16: bool, inside: Int32 | None = None) -> None:
    """Consecutive values to global memory at base + offset; BF16 is rounded to nearest even here, once."""
    if bf16:
        words = [exact.fp32_to_bf16(values[i], values[i + 1]) for i in range(0, len(values), 2)]
    else:
        words = [exact.fp32_to_bits(value) for value in values]
    store_words(base, offset, words, inside)


def store_words(base: Int64, offset: int, words: list[Int32], inside: Int32 | None = None) -> None:
    """The same for what is in its final form."""
    limit = VECTOR_BYTES // 4
    for first in range(0, len(words), limit):
        _store_words(base, offset + 4 * first, words[first : first + limit], inside)


def store_sectors(base: Int64, offset: int, values: list[Float32], odd: Int32, inside: Int32 | None = None) -> None:
    """Eight FP32 values of each lane, neighbours in neighbouring lanes, as whole 32-byte sectors.

    A lane's own eight values are two 16-byte stores, each of which fills half of 32 sectors of a warp, and the L2 cache
    takes half sectors at the price of whole ones (0.5 us of 3.5 for 64 rows of 8192 on an H200). So two neighbouring
    lanes trade: the first store of both writes the even lane's sector, the second the odd lane's. `odd` is the parity
    of the lane, as 0 or 1; `inside` must be equal in both.
    """
    bits = [exact.fp32_to_bits(value) for value in values]
    first, second = bits[:4], bits[4:]
    received = [
        Int32(cute.arch.shuffle_sync_bfly(exact.select(odd, mine, other), 1))
        for mine, other in zip(first, second, strict=True)
    ]
    base = base - Int64(odd) * Int64(16)
    even_sector = [exact.select(odd, other, mine) for mine, other in zip(first, received, strict=True)]
    odd_sector = [exact.select(odd, mine, other) for mine, other in zip(second, received, strict=True)]
    _store_words(base, offset, even_sector, inside)
    _store_words(base, offset + 32, odd_sector, inside)


def _store_words(base: Int64, offset: int, words: list[Int32], inside: Int32 | None) -> None:
    count = len(words)
    operation = f"st.global{_suffix(count)} [$0+{offset}], {_list(1, count)};"
    constraints = "l" + ",r" * count
    if inside is None:
        exact.asm(None, [base, *words], operation, constraints, side_effects=True)
    else:
        text = f"{{ .reg .pred p; setp.ne.s32 p, ${count + 1}, 0; @p {operation} }}"
        exact.asm(None, [base, *words, inside], text, constraints + ",r", side_effects=True)
