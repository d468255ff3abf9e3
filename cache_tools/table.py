"""Tables on a terminal: columns as wide as their content, fewer of them where it is narrow, colour only for people."""

import shutil
import sys
from collections.abc import Iterable, Sequence

from muse_jit.console import colour_wanted

_COLOURS = {"red": 31, "green": 32, "yellow": 33, "bold": 1, "dim": 2}


def width() -> int | None:
    """Columns of the terminal; None where standard output is none, and lines are as long as they are."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def coloured(text: str, colour: str) -> str:
    """`text` in a colour, where standard output is a terminal that wants it."""
    return f"\x1b[{_COLOURS[colour]}m{text}\x1b[0m" if colour_wanted() else text


def cut(text: str, limit: int | None) -> str:
    """At most `limit` columns, with a mark where something was left out."""
    return text if limit is None or len(text) <= limit else text[: max(limit - 1, 0)] + _mark()


def print_line(text: str, colour: str | None = None) -> None:
    """One line, cut at the terminal's width."""
    line = cut(text, width())
    print(coloured(line, colour) if colour else line)


def print_table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    optional: Sequence[str] = (),
    right: Sequence[str] = (),
    colours: Sequence[str | None] = (),
    indent: str = "",
) -> None:
    """Print a table. `optional` names columns that go, first first, until a narrow terminal has room for the rest;
    `right` those that are aligned to the right; `colours` has one for each row."""
    body = [tuple(row) for row in rows]
    limit = width()
    keep = list(range(len(head)))
    widths = [max(len(row[i]) for row in [tuple(head), *body]) for i in range(len(head))]
    for name in optional:
        if limit is not None and _needed(widths, keep, len(indent)) > limit and len(keep) > 1:
            keep.remove(list(head).index(name))
    for number, row in enumerate([tuple(head), *body]):
        cells = [row[i].rjust(widths[i]) if head[i] in right else row[i].ljust(widths[i]) for i in keep]
        line = cut((indent + "  ".join(cells)).rstrip(), limit)
        colour = "bold" if number == 0 else colours[number - 1] if colours else None
        print(coloured(line, colour) if colour else line)


def _needed(widths: Sequence[int], keep: Sequence[int], indent: int) -> int:
    """Columns that a table needs to be of use: the last column may be cut, to 24."""
    fixed = [widths[i] for i in keep[:-1]]
    return indent + sum(fixed) + 2 * len(fixed) + min(widths[keep[-1]], 24)


def _mark() -> str:
    try:
        "…".encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return "~"
    return "…"
