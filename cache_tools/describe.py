"""Entries in words: rows for tables, rows for JSON, values and ages for people."""

import json
from typing import Any

from muse_jit.console import size_text
from muse_jit.store.listing import Listed
from muse_jit.store.lookup import Miss

COLUMNS = ("DIGEST", "KERNEL", "ARCH", "SIZE", "COMPILE", "AGE", "USED", "CONSTANTS")


def as_json_row(item: Listed) -> dict[str, Any]:
    """The fields of one entry in `ls --json`. Of a damaged entry only digest, sizes, stamp and `damaged` are known."""
    row: dict[str, Any] = {
        "digest": item.digest,
        "kernel": None,
        "arch": None,
        "cuda": None,
        "host": None,
        "size": item.size,
        "disk": item.disk,
        "compile_s": None,
        "link_s": None,
        "created": None,
        "last_used": item.last_used,
        "constants": None,
        "damaged": damage_text(item.entry) if isinstance(item.entry, Miss) else None,
    }
    if not isinstance(item.entry, Miss):
        entry = item.entry
        row |= {"kernel": entry.kernel, "arch": entry.arch, "constants": entry.key.get("constants")}
        row |= {"cuda": entry.key["target"].get("cuda"), "host": entry.key["target"].get("host")}
        row |= {"compile_s": entry.compile_seconds, "link_s": entry.link_seconds, "created": entry.created}
    return row


def columns(item: Listed, now: float) -> tuple[str, ...]:
    """One row of the table, a cell for each of COLUMNS."""
    digest, size = item.digest[:12], size_text(item.size)
    if isinstance(item.entry, Miss):
        return (digest, "(damaged)", "-", size, "-", "-", "-", damage_text(item.entry))
    entry = item.entry
    return (
        digest,
        printable(entry.kernel),
        printable(entry.arch),
        size,
        seconds_text(entry.compile_seconds),
        age_text(now - entry.created),
        used_text(item, now),
        constants_text(entry.key.get("constants")),
    )


def was_used(item: Listed) -> bool | None:
    """Whether a use is recorded: the stamp moves at most once a day, so the first day's uses leave no trace.

    None where there is nothing to read it from.
    """
    if isinstance(item.entry, Miss) or item.last_used is None:
        return None
    return item.last_used - item.entry.created > 3600.0


def used_text(item: Listed, now: float) -> str:
    """How long ago the last use was that is recorded; "-" where none is."""
    return f"{age_text(now - item.last_used)}" if was_used(item) and item.last_used is not None else "-"


def damage_text(miss: Miss) -> str:
    """What is wrong with an entry, in one printable line."""
    return printable(f"{miss.reason}: {miss.detail}" if miss.detail else str(miss.reason))


def constants_text(constants: Any) -> str:
    """ "eps=1e-05 hidden=8192 ...": in one line, switches by name only when on."""
    if not isinstance(constants, dict):
        return "?"
    parts = []
    for name, value in constants.items():
        if value is True:
            parts.append(printable(name))
        elif value is not False:
            parts.append(f"{printable(name)}={printable(value)}")
    return " ".join(parts)


def value_text(value: Any) -> str:
    """A value of a key as JSON writes it, so that 1, 1.0, true and "1" look different."""
    try:
        return printable(json.dumps(value, ensure_ascii=False))
    except (TypeError, ValueError):
        return printable(value)


def seconds_text(seconds: float) -> str:
    """Seconds for people: 0.31 s, 12.5 s, 4.2 min, 3.1 h."""
    if seconds < 10:
        return f"{seconds:.2f} s"
    for unit, length in (("s", 1.0), ("min", 60.0)):
        if seconds < 60 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds / 3600:.1f} h"


def age_text(seconds: float) -> str:
    """Seconds for people; a time in the future, after a clock step, counts as now."""
    value = max(seconds, 0.0)
    for unit, length in (("s", 60.0), ("min", 60.0), ("h", 24.0)):
        if value < length:
            return f"{value:.0f} {unit}"
        value /= length
    return f"{value:.0f} d"


def printable(value: Any) -> str:
    """Text from a manifest without control characters, which a terminal would obey."""
    return "".join(c if c.isprintable() else "?" for c in str(value))


def plural(count: int, one: str, many: str = "") -> str:
    """ "1 entry", "2 entries"."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"
