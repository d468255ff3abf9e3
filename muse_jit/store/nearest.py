"""The entry that comes nearest to a key: the answer to "why did this recompile" is what differs from it.

Near is what a person means by "the same kernel": of the same family, with the fewest causes of difference. Each
constant, each part of the target and each option is a cause of its own; toolchain, source, build function and the
versions of key and recipe are one cause each, in however many leaves they differ. Of equally near ones that with the
same constants and target wins, then the one made last.
"""

from collections.abc import Sequence
from typing import Any

from muse_jit.key.difference import Difference, difference
from muse_jit.key.encoding import encode
from muse_jit.store.entry import Entry
from muse_jit.store.layout import Layout
from muse_jit.store.listing import listed
from muse_jit.store.lookup import Miss

_SINGLE_CAUSES = ("toolchain", "source", "build", "schema", "recipe")


def nearest(
    layout: Layout, document: dict[str, Any], before: float | None = None
) -> tuple[Entry, list[Difference]] | None:
    """The entry nearest to a key document, other than its own, and the leaves that differ, stored value first.

    With `before` (seconds since the epoch) only entries made before: what was there when this one was compiled. None
    where the cache has no other entry of the kernel family. Damaged entries are passed over.
    """
    return nearest_each(layout, [document], before)[0]


def nearest_each(
    layout: Layout, documents: Sequence[dict[str, Any]], before: float | None = None
) -> list[tuple[Entry, list[Difference]] | None]:
    """`nearest` for several key documents, with one pass over the cache."""
    if not documents:
        return []
    best: list[tuple[tuple[Any, ...], Entry, list[Difference]] | None] = [None] * len(documents)
    by_kernel: dict[Any, list[int]] = {}
    for number, document in enumerate(documents):
        by_kernel.setdefault(document["kernel"], []).append(number)
    encoded = [encode(document) for document in documents]
    for item in listed(layout):
        if isinstance(item.entry, Miss) or (before is not None and item.entry.created >= before):
            continue
        for number in by_kernel.get(item.entry.kernel, ()):
            if encode(item.entry.key) == encoded[number]:
                continue
            parts = difference(item.entry.key, documents[number])
            rank = (*_distance(parts), -item.entry.created, item.digest)
            known = best[number]
            if known is None or rank < known[0]:
                best[number] = (rank, item.entry, parts)
    return [None if found is None else (found[1], found[2]) for found in best]


def causes(parts: Sequence[Difference]) -> list[str]:
    """The causes behind differing leaves, in order: "constants.eps", "toolchain", ..."""
    names = (d.part if d.part.partition(".")[0] not in _SINGLE_CAUSES else d.part.partition(".")[0] for d in parts)
    return list(dict.fromkeys(names))


def _distance(parts: Sequence[Difference]) -> tuple[int, int]:
    return len(causes(parts)), sum(d.part.startswith(("constants.", "target.")) for d in parts)
