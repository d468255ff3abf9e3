"""The frame of the report: one HTML file without links to anything, and the pieces that every section is made of.

Whatever comes from a manifest or a trace goes through `text`. Should something slip past it, the page's policy still
lets no script but its own run and nothing load: scripts and styles are named by their digests, the rest is 'none'.
"""

import base64
import hashlib
import html
from collections.abc import Iterable, Sequence
from typing import Any

from cache_tools.describe import printable
from cache_tools.page_style import SCRIPT, STYLE


def text(value: Any) -> str:
    """A value as text that is safe in an element and in an attribute."""
    return html.escape(printable(value), quote=True)


def document(title: str, subtitle: str, sections: Iterable[str]) -> str:
    """The whole page; `title` and `subtitle` are plain text, `sections` markup."""
    policy = f"default-src 'none'; script-src '{_digest(SCRIPT)}'; style-src '{_digest(STYLE)}'; base-uri 'none'"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">
<title>{text(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<header><h1>{text(title)}</h1><p class="quiet">{text(subtitle)}</p></header>
<main>
{"".join(sections)}</main>
<div id="tip" role="status" hidden></div>
<script>{SCRIPT}</script>
</body>
</html>
"""


def section(name: str, title: str, says: str, body: str) -> str:
    """One section: a title, a sentence that says what is to be seen, and its body (markup)."""
    return f'<section id="{name}" aria-labelledby="{name}-title"><h2 id="{name}-title">{text(title)}</h2>' \
           f'<p class="says">{text(says)}</p>{body}</section>\n'  # fmt: skip


def figure(name: str, chart: str, numbers: str, legend: str = "") -> str:
    """A picture (markup), its legend, and its numbers as a table that opens below it."""
    below = f"<details><summary>The numbers</summary>{numbers}</details>"
    return f'<figure data-chart="{name}">{legend}{chart}{below}</figure>'


def table(
    head: Sequence[str], rows: Iterable[Sequence[Any]], numeric: Sequence[str] = (), wide: Sequence[str] = ()
) -> str:
    """A table of plain values; columns named in `numeric` are aligned to the right, those in `wide` break their lines.
    It scrolls where it is too wide."""
    classes = {**dict.fromkeys(numeric, ' class="number"'), **dict.fromkeys(wide, ' class="wrap"')}
    marks = [classes.get(name, "") for name in head]
    heads = "".join(f'<th scope="col"{mark}>{text(name)}</th>' for name, mark in zip(head, marks, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{mark}>{_cell(cell)}</td>" for cell, mark in zip(row, marks, strict=True)) + "</tr>"
        for row in rows
    )
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="table">'
        f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>"
    )


class Markup(str):
    """Text that is markup already, for a cell of a table."""

    __slots__ = ()


def _cell(value: Any) -> str:
    return str(value) if isinstance(value, Markup) else text(value)


def legend(names: Sequence[tuple[str, str]]) -> str:
    """Class of a colour and what it stands for."""
    if len(names) < 2:
        return ""
    items = "".join(
        f'<li><svg class="key" aria-hidden="true"><rect class="{colour}" width="100%" height="100%" rx="3"/></svg>'
        f"{text(name)}</li>"
        for colour, name in names
    )
    return f'<ul class="legend">{items}</ul>'


def tiles(values: Iterable[tuple[str, str, str]]) -> str:
    """The numbers that matter, large: value, what it is, and a class ("", "bad", "warn")."""
    items = "".join(
        f'<li class="{mark}"><b>{text(value)}</b><span>{text(name)}</span></li>' for value, name, mark in values
    )
    return f'<ul class="tiles">{items}</ul>'


def _digest(content: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
