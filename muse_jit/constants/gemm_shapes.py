"""Which launch shape the small-M GEMM has for a size, a bucket of rows and an architecture.

gemm_shapes.json, beside this file, has the shapes that were measured, each with its measurement:
benchmarks/gemm_tune.py finds them, benchmarks/gemm_table.py writes them there. Any other size or architecture gets a
shape that is worked out here: valid, plausible, and said to be untuned. `gemm_constants` is the one way from a size to
constant sets, so what is planned is what is launched.

The kernel does not import this file: another table compiles nothing anew but the shapes that it changed.
"""

import dataclasses
import functools
import itertools
import json
import logging
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from muse_jit.constants.mailbox import Shape
from muse_jit.constants.small_m_gemm import K_BLOCK, M_TILE, SHARED_BYTES, GemmShape, SmallMGemmConstants
from muse_jit.errors import ConstantsError

logger = logging.getLogger("muse_jit")

FILE = "gemm_shapes.json"
SCHEMA = 1
BUCKETS = (8, 16, 32, 64)
"""Most rows of x that a kernel is compiled for; a launch takes the smallest that covers its rows."""

SMS = {"sm_90a": 132, "sm_100a": 148, "sm_103a": 148, "sm_120a": 170}
"""SMs of the architecture's usual GPU. Only untuned shapes go by it; on another GPU they are as valid."""


class ByRows(NamedTuple):
    """Instead of one launch shape: that of each bucket, from the table. Its fields name it in logs."""

    layer: str
    """Whose weight it is."""
    source: str
    buckets: tuple[int, ...]
    """The buckets to choose from, ascending."""


OPROJ = ByRows("o_proj", "tuned by rows", BUCKETS)
UNPOOLER = ByRows("unpooler", "tuned by rows", BUCKETS)


@dataclasses.dataclass(frozen=True)
class Entry:
    """One line of the table: the fastest shape of a case, and what was measured."""

    arch: str
    n: int
    k: int
    rows: int
    """The bucket; measured with as many rows."""
    shape: GemmShape
    us: float
    """Microseconds a launch of ours."""
    torch_mm_us: float
    """Of torch.mm of the same operands in the same run."""
    device: str
    torch: str
    """Version of torch."""

    @property
    def case(self) -> tuple[str, int, int, int]:
        """What the entry is for; unique in a table, and its order."""
        return (self.arch, self.n, self.k, self.rows)


class Chosen(NamedTuple):
    """A launch shape and, where it was measured, its entry."""

    shape: GemmShape
    entry: Entry | None

    @property
    def tuned(self) -> bool:
        """Whether it comes from the table."""
        return self.entry is not None


def bucket_of(rows: int, buckets: tuple[int, ...] = BUCKETS) -> int:
    """The smallest bucket that covers a row count.

    Raises:
        ConstantsError: (a ValueError) there is none.
    """
    for bucket in buckets:
        if 1 <= rows <= bucket:
            return bucket
    raise ConstantsError(f"rows is {rows}; the small-M GEMM takes from 1 to {buckets[-1]}")


def gemm_constants(
    n: int,
    k: int,
    rows: Iterable[int],
    arch: str,
    *,
    pdl: bool,
    shape: ByRows | GemmShape = UNPOOLER,
    mailbox: Shape | None = None,
) -> tuple[SmallMGemmConstants, ...]:
    """The constant sets of x [b, k] weight [n, k]^T for every b of `rows`: one for each bucket needed, ascending.

    `shape` is the table's, bucket by bucket, or one shape for all of them. With `pdl` the next grid may start right
    after this one's wait: a dependent waits for this whole grid before it reads. `mailbox`: where the result is
    published, too.

    Raises:
        ConstantsError: (a ValueError) no rows or too many; a shape that is not possible for a bucket; n or k for which
            none is. Names the field.
    """
    buckets = shape.buckets if isinstance(shape, ByRows) else BUCKETS
    needed = sorted({bucket_of(count, buckets) for count in rows})
    if not needed:
        raise ConstantsError("rows is empty; the small-M GEMM needs the row counts that it is to be ready for")
    chosen = ((bucket, _chosen(n, k, bucket, arch, shape)) for bucket in needed)
    return tuple(_constants(n, k, bucket, arch, one, pdl=pdl, mailbox=mailbox) for bucket, one in chosen)


def _chosen(n: int, k: int, bucket: int, arch: str, shape: ByRows | GemmShape) -> GemmShape:
    return shape if isinstance(shape, GemmShape) else shape_for(n, k, bucket, arch).shape


def _constants(
    n: int, k: int, bucket: int, arch: str, shape: GemmShape, *, pdl: bool, mailbox: Shape | None = None
) -> SmallMGemmConstants:
    """Checked for the architecture, too."""
    made = SmallMGemmConstants(n=n, k=k, rows=bucket, **shape._asdict(), enable_pdl=pdl, release_early=pdl)
    if mailbox is not None:
        if mailbox.width != n:
            raise ConstantsError(f"n is {n}; the mailbox that it is published into is {mailbox.width} wide")
        made = dataclasses.replace(made, publish_tp=mailbox.tp, transport=mailbox.transport, capacity=mailbox.capacity)
    made.validate_for(arch)
    return made


def shape_for(n: int, k: int, rows: int, arch: str) -> Chosen:
    """The table's shape for the bucket of `rows`, else an untuned one, which is logged once for a size.

    Raises:
        ConstantsError: (a ValueError) rows beyond the buckets, an unknown architecture, or n or k for which there is
            no shape.
    """
    bucket = bucket_of(rows)
    entry = table().get((arch, n, k, bucket))
    if entry is not None:
        return Chosen(entry.shape, entry)
    shape = default_shape(n, k, bucket, arch)
    _say_untuned(n, k, arch)
    return Chosen(shape, None)


@functools.cache
def _say_untuned(n: int, k: int, arch: str) -> None:
    logger.info("small-M GEMM [%d, %d] on %s: not every launch shape is tuned; untuned ones may be slow", n, k, arch)


@functools.cache
def default_shape(n: int, k: int, bucket: int, arch: str) -> GemmShape:
    """A valid shape for any n that is a multiple of 16 and k that is one of 32.

    The busiest SM is to read as few rows of the weight as possible; among equals fewer, larger blocks win, since each
    reads x again.

    Raises:
        ConstantsError: (a ValueError) another n or k, naming it, or an unknown architecture.
    """
    if arch not in SHARED_BYTES:
        raise ConstantsError(f"arch is {arch!r}; the small-M GEMM has {', '.join(SHARED_BYTES)}")
    for name, value, step in (("n", n, M_TILE), ("k", k, K_BLOCK)):
        if value < 1 or value % step:
            raise ConstantsError(f"{name} is {value}; the small-M GEMM needs a positive multiple of {step}")
    best: tuple[tuple[int, ...], GemmShape] | None = None
    for tile_n, m_tiles, warps in itertools.product((16, 32, 64, 128), (1, 2), (1, 2, 4, 8)):
        shape = _fitted(GemmShape(tile_n, warps, m_tiles), n, k, bucket, arch)
        worth = _worth(shape, n, bucket, SMS[arch]) if shape is not None else ()
        if shape is not None and (best is None or worth < best[0]):
            best = worth, shape
    if best is None:
        raise ConstantsError(f"n is {n}, k is {k}; the small-M GEMM has no launch shape for {bucket} rows on {arch}")
    return best[1]


def _fitted(shape: GemmShape, n: int, k: int, bucket: int, arch: str) -> GemmShape | None:
    """With its depths and divisions at their defaults, or all cut to what a short K allows; None where that is none."""
    for most in (4, 2, 1):
        x_depth = 1 if bucket > 16 else min(most, 2)  # at 64 rows two blocks of x spill on sm_120a
        fitted = shape._replace(copy_blocks=most, stages=min(most, 2), x_depth=x_depth)
        try:
            _constants(n, k, bucket, arch, fitted, pdl=True)
        except ConstantsError:
            continue
        return fitted
    return None


def _worth(shape: GemmShape, n: int, bucket: int, sms: int) -> tuple[int, ...]:
    """Smaller is better: rows of the busiest SM, its blocks, how far its warps are from 16 tiles, tiles of a warp.

    Sixteen tiles a block is what the first measurements favoured. With many rows of x the sums want the registers, so
    then a warp has one tile; with few it has two, for fewer reads of x.
    """
    each = -(-n // (shape.tile_n * sms))
    tiles = shape.warps * shape.m_tiles
    return (
        each * shape.tile_n,
        each,
        max(tiles, 16) // min(tiles, 16),
        shape.m_tiles if bucket > 16 else -shape.m_tiles,
    )


@functools.cache
def table() -> dict[tuple[str, int, int, int], Entry]:
    """The shipped table by case, read once.

    Raises:
        ConstantsError: the shipped file is damaged; says where.
    """
    from importlib.resources import files  # the norms of a start do without

    return read_table(files("muse_jit.constants").joinpath(FILE).read_text(encoding="utf-8"))


def read_table(text: str) -> dict[tuple[str, int, int, int], Entry]:
    """The entries of a table's text by case: every shape is checked against its case.

    Raises:
        ConstantsError: it is no table, or an entry is not possible; names the entry and the field.
    """
    try:
        document = json.loads(text)
    except ValueError as error:
        raise ConstantsError(f"{FILE} is not JSON: {error}") from None
    if not isinstance(document, dict) or document.get("schema") != SCHEMA or type(document.get("entries")) is not list:
        raise ConstantsError(f"{FILE} is not a table of schema {SCHEMA}")
    entries: dict[tuple[str, int, int, int], Entry] = {}
    for number, item in enumerate(document["entries"]):
        try:
            entry = _entry(item)
        except ConstantsError as error:
            raise ConstantsError(f"{FILE}, entry {number}: {error}") from None
        if entry.case in entries:
            raise ConstantsError(
                f"{FILE}, entry {number}: {entry.arch} [{entry.n}, {entry.k}] {entry.rows} is there twice"
            )
        entries[entry.case] = entry
    return entries


def _entry(item: Any) -> Entry:
    fields = [f.name for f in dataclasses.fields(Entry)]
    if not isinstance(item, dict) or item.keys() != set(fields):
        raise ConstantsError(f"it must have exactly the fields {', '.join(fields)}")
    shape = item["shape"]
    if not isinstance(shape, dict) or not set(shape) <= set(GemmShape._fields):
        raise ConstantsError(f"shape must have fields of {', '.join(GemmShape._fields)} only")
    if not {*GemmShape._fields[:3]} <= set(shape):
        raise ConstantsError(f"shape must have {', '.join(GemmShape._fields[:3])} at least")
    for name in ("us", "torch_mm_us"):
        if type(item[name]) not in (int, float) or not 0 < item[name] < math.inf:
            raise ConstantsError(f"{name} is {item[name]!r}; it must be positive microseconds")
    for name in ("arch", "device", "torch"):
        if type(item[name]) is not str:
            raise ConstantsError(f"{name} is {item[name]!r}; it must be text")
    entry = Entry(**{**item, "shape": GemmShape(**shape)})
    if entry.arch not in SHARED_BYTES:
        raise ConstantsError(f"arch is {entry.arch!r}; allowed: {', '.join(SHARED_BYTES)}")
    if entry.rows not in BUCKETS:
        raise ConstantsError(f"rows is {entry.rows!r}; allowed: {', '.join(map(str, BUCKETS))}")
    _constants(entry.n, entry.k, entry.rows, entry.arch, entry.shape, pdl=True)
    return entry


def table_text(entries: Iterable[Entry]) -> str:
    """What the file is to hold: one line an entry, in order, so that a change is a line of a diff.

    Raises:
        ConstantsError: as `read_table`.
    """
    lines = []
    for entry in sorted(entries, key=lambda e: e.case):
        lines.append(json.dumps({**dataclasses.asdict(entry), "shape": entry.shape._asdict()}))
    text = f'{{"schema": {SCHEMA}, "entries": [\n' + ",\n".join(lines) + "\n]}\n"
    read_table(text)
    return text
