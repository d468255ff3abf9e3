"""Go through a large cache with several processes, each through its share of the 256 shards.

Forked, because this process has read by then what all of them need (toolchain, sources), and because nothing runs in
it beside this. A share comes back as JSON through a pipe; one that does not come back is gone through here.
"""

import json
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from muse_jit.store.layout import Layout
from muse_jit.store.listing import digests

SHARDS = tuple(f"{n:02x}" for n in range(256))
FIRST = 4
"""Shards that are gone through before: they say how large the cache is, and make known what it holds."""

_LARGE = 10_000
"""Entries from which on processes are worth their start."""
_MOST = 8


def processes_for(layout: Layout) -> int:
    """How many processes to use: one for each usable CPU, at most eight, and one alone for a small cache."""
    seen = sum(1 for shard in SHARDS[:FIRST] for _ in digests(layout, shard))
    if seen * len(SHARDS) // FIRST < _LARGE:
        return 1
    return min(len(os.sched_getaffinity(0)), _MOST)


def in_shares(
    shards: tuple[str, ...], processes: int, work: Callable[[tuple[str, ...]], dict[str, Any]]
) -> list[dict[str, Any]]:
    """What `work` makes of each share of the shards, in no order. `work` gives what JSON can hold."""
    shares = [shards[n::processes] for n in range(processes)]
    children = [_start(share, work) for share in shares[1:]]
    results = [work(shares[0])]
    for share, pipe in zip(shares[1:], children, strict=True):
        result = None if pipe is None else _collect(*pipe)
        results.append(work(share) if result is None else result)
    return results


def _start(share: tuple[str, ...], work: Callable[[tuple[str, ...]], dict[str, Any]]) -> tuple[int, int] | None:
    """Process id and the end of its pipe; None where no process can be started."""
    reader, writer = os.pipe()
    try:
        pid = os.fork()
    except OSError:
        os.close(reader)
        os.close(writer)
        return None
    if pid:
        os.close(writer)
        return pid, reader
    code = 1
    try:  # the child: whatever happens, it never returns from here
        os.close(reader)
        data = json.dumps(work(share)).encode()
        with open(writer, "wb") as file:
            file.write(data)
        code = 0
    finally:
        os._exit(code)


def _collect(pid: int, reader: int) -> dict[str, Any] | None:
    """The result of a child that ended well."""
    with open(reader, "rb") as file:
        data = file.read()
    _, status = os.waitpid(pid, 0)
    if status:
        return None
    with suppress(ValueError):
        result: dict[str, Any] = json.loads(data)
        return result
    return None
