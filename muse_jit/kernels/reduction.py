"""Sums whose order of operations is a contract: inside a thread, across a warp, across the warps of a CTA.

FP32 addition is not associative, so "bit for bit the same as Triton" means the same tree. Each function names the
tree it builds; which tree stock builds for which architecture was read from Triton's PTX and SASS and is said where a
kernel chooses. Sums of squares are never -0.0 and addition commutes, so in a butterfly all lanes agree.
"""

from collections.abc import Callable

from cutlass import Float32, Int32, cute

from muse_jit.kernels import exact
from muse_jit.kernels.exact import F32

WARP = 32


def _halve(values: F32) -> tuple[F32, F32]:
    return values[0::2], values[1::2]


def adjacent_tree(values: F32) -> Float32:
    """((v0+v1) + (v2+v3)) + ...: a balanced tree over neighbours; the length is a power of two."""
    while len(values) > 1:
        left, right = _halve(values)
        values = exact.add_all(left, right, packed=False)
    return values[0]


def squares_pairwise(x: F32) -> Float32:
    """fma(x0, x0, rn(x1^2)) of every neighbour pair, then the balanced adjacent tree."""
    even, odd = _halve(x)
    return adjacent_tree(exact.fma_all(even, even, exact.mul_all(odd, odd, packed=False), packed=False))


def _lanes_tree(pairs: list[F32], packed: bool) -> Float32:
    """Two sums side by side, evens and odds, each a balanced adjacent tree; at the end even + odd."""
    while len(pairs) > 1:
        pairs = [exact.add_all(a, b, packed=packed) for a, b in zip(pairs[0::2], pairs[1::2], strict=True)]
    return exact.add(pairs[0][0], pairs[0][1])


def squares_two_lanes(x: F32, *, packed: bool) -> Float32:
    """Every square rounded; then evens and odds in two trees, and even + odd."""
    pairs = [x[i : i + 2] for i in range(0, len(x), 2)]
    return _lanes_tree([exact.mul_all(p, p, packed=packed) for p in pairs], packed)


def squares_two_lanes_fused(x: F32, *, packed: bool) -> Float32:
    """As `squares_two_lanes`, but its first level is fused: lane by lane fma(a, a, rn(b^2)) of neighbour pairs."""
    pairs = [x[i : i + 2] for i in range(0, len(x), 2)]
    first = [
        exact.fma_all(a, a, exact.mul_all(b, b, packed=packed), packed=packed)
        for a, b in zip(pairs[0::2], pairs[1::2], strict=True)
    ]
    return _lanes_tree(first, packed)


def squares_chain(x: F32) -> Float32:
    """fma(x0, x0, rn(x1^2)), then one FMA per further element, in order."""
    total = exact.fma(x[0], x[0], exact.mul(x[1], x[1]))
    for value in x[2:]:
        total = exact.fma(value, value, total)
    return total


def butterfly(value: Float32, lanes: int) -> Float32:
    """The sum over groups of `lanes` neighbouring lanes, in every lane: xor lanes/2, ..., 2, 1."""
    offset = lanes // 2
    while offset:
        value = exact.add(value, cute.arch.shuffle_sync_bfly(value, offset))
        offset //= 2
    return value


def across_warps(value: Float32, warps: int, thread: Int32) -> Float32:
    """The sum of one value per warp (equal in its lanes), in every thread: one barrier, then a butterfly.

    `warps` is a power of two up to 32. Every lane of a warp stores: they carry the same bits, and a predicate would
    cost more than it saves. Every thread then repeats the last butterfly itself, which saves a second barrier.
    """
    if warps == 1:
        return value
    slots = cute.make_tensor(cute.arch.alloc_smem(Float32, warps, alignment=16), cute.make_layout(warps))
    slots[thread >> Int32(5)] = value
    cute.arch.sync_threads()
    return butterfly(slots[thread & Int32(warps - 1)], warps)


def cta_sum(x: F32, in_thread: Callable[[F32], Float32], warps: int, thread: Int32) -> Float32:
    """`in_thread` over the thread's values, then the warp butterfly 16, 8, 4, 2, 1, then across the warps."""
    return across_warps(butterfly(in_thread(x), WARP), warps, thread)
