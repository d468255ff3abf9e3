"""Rows to compare dual norms on: in a wrong order of operations some of them give other bits."""

import itertools

import numpy as np

from oracle import dual, fp32


def mixed(random: np.random.Generator, *shape: int) -> np.ndarray:
    return (random.standard_normal(shape) * 10.0 ** random.uniform(-1.5, 1.5, shape)).astype(np.float32)


def telling_values(random: np.random.Generator, count: int) -> np.ndarray:
    """Values of `count` threads, between them telling all orders apart: as they are, and as far as possible in BF16.

    (BF16 squares are exact in FP32, so there only the association of the sum can show.)
    """
    values = mixed(random, 1000, 8)
    pairs = []
    for x in (values, fp32.round_bf16(values)):
        sums = [order(x) for order in dual.ORDERS.values()]
        pairs += [a != b for a, b in itertools.combinations(sums, 2)]
    differ, chosen = np.array(pairs).T, []
    missing = differ.any(axis=0)
    while len(chosen) < count:
        chosen.append(int((differ * (1e-3 + missing)).sum(axis=1).argmax()))
        missing &= ~differ[chosen[-1]]
        differ[chosen[-1]] = False
    assert not missing.any()
    return values[chosen]


def sparse_rows(hidden: int, seed: int) -> np.ndarray:
    """Rows in which a wrong order shows, because few terms of mixed size make up a sum.

    Ten rows have all their values in one thread, three have one value in each thread of a warp, three have one in
    each warp. Which columns these are does not depend on the seed, so that partial and stream agree on them.
    """
    random = np.random.default_rng(seed)
    columns = np.arange(hidden)
    threads = [np.flatnonzero(columns // 8 == (37 * k) % (hidden // 8)) for k in range(10)]
    lanes = [np.flatnonzero((columns // 256 == k % -(-hidden // 256)) & (columns % 8 == k)) for k in range(3)]
    warps = [np.flatnonzero(columns % 256 == 8 * k + k) for k in range(3)]
    x = np.zeros((16, hidden), np.float32)
    for row, places, values in zip(x, threads, telling_values(random, len(threads)), strict=False):
        row[places] = values
    for row, places in zip(x[len(threads) :], lanes + warps, strict=True):
        row[places] = mixed(random, places.size)
    return x


def special_rows(hidden: int, seed: int) -> np.ndarray:
    """Plain rows, and rows of special values."""
    random = np.random.default_rng(seed)
    plain = random.standard_normal((8, hidden))
    wild = random.standard_normal((2, hidden)) * 10.0 ** random.uniform(-30, 30, (2, hidden))
    mild = random.standard_normal((2, hidden)) * 10.0 ** random.uniform(-2, 2, (2, hidden))
    tiny = random.standard_normal((1, hidden)) * 1e-40
    x = np.concatenate([plain, wild, mild, tiny, np.zeros((2, hidden))]).astype(np.float32)
    x[-1] = -0.0
    x[0, hidden // 2] = np.inf
    x[1, hidden - 1] = np.nan
    x[2, 1] = np.float32(3e38)
    x[3, ::2] = 0.0
    return x


def rows_for(hidden: int, seed: int, turned: int) -> np.ndarray:
    """Special rows are turned, so that those of one operand meet plain ones of the other."""
    return np.concatenate([sparse_rows(hidden, seed), np.roll(special_rows(hidden, seed), turned, axis=0)])


def vector_for(shape: int, seed: int, low: float, high: float) -> np.ndarray:
    vector = np.random.default_rng(seed).uniform(low, high, shape).astype(np.float32)
    if shape > 1:
        vector[:4] = [0.0, -0.0, -1.0, 1e-39]
    return vector
