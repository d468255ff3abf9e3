"""The tables of the report: resources with bars beside the numbers, and what is damaged or stale."""

import datetime
from collections.abc import Sequence
from typing import Any

from cache_tools.charts import data_bar
from cache_tools.details import RESOURCES
from cache_tools.page import Markup, text
from cache_tools.standing import Standing

_MOST = {"registers": 255.0}


def day(seconds: float, time: bool = False) -> str:
    """A date, or date and minute, in UTC."""
    try:
        moment = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    except (OverflowError, OSError, ValueError):
        return "a date that cannot be"
    return moment.strftime("%Y-%m-%d %H:%M" if time else "%Y-%m-%d")


def resource_rows(entries: Sequence[tuple[str, str, str, list[dict[str, Any]]]]) -> list[tuple[Any, ...]]:
    """A row for each GPU kernel, the most registers first."""
    rows = [(kernel, arch, digest, gpu) for kernel, arch, digest, resources in entries for gpu in resources]
    most = {name: max((_number(gpu.get(name)) or 0.0 for *_, gpu in rows), default=0.0) for name in RESOURCES} | _MOST
    rows.sort(key=lambda row: (-(_number(row[3].get("registers")) or 0.0), row[0], row[1], row[2]))
    return [
        (kernel, arch, Markup(f'<code title="{text(gpu.get("name"))}">{text(digest[:12])}</code>'),
         *(_cell(name, gpu.get(name), most[name]) for name in RESOURCES))
        for kernel, arch, digest, gpu in rows
    ]  # fmt: skip


def _cell(name: str, value: Any, most: float) -> Any:
    number = _number(value)
    if number is None:
        return "-"
    bad = name == "local_bytes" and number > 0
    shown = f'<span class="bad">{number:,.0f}</span>' if bad else f"{number:,.0f}"
    return Markup(data_bar(min(number, most), most, bad) + shown)


def _number(value: Any) -> float | None:
    """A number of a manifest, which may say anything."""
    return float(value) if type(value) is int and 0 <= value < 1 << 53 else None


_REMEDIES = {
    Standing.TOOLCHAIN: "muse-cache prune --toolchain stale",
    Standing.SOURCE: "goes by size or age: muse-cache prune --older-than 30d",
}
_WORDS = {Standing.TOOLCHAIN: "made by another toolchain", Standing.SOURCE: "made from another source"}


def trouble_rows(
    damaged: Sequence[tuple[str, str]], dead: Sequence[tuple[str, str, Standing]], limit: int
) -> list[tuple[Any, ...]]:
    """Damaged entries first, then stale ones; at the end how many more there are."""
    rows: list[tuple[Any, ...]] = [
        (_code(digest), "?", Markup(f'<span class="bad">{text(what)}</span>'), "muse-cache prune --damaged")
        for digest, what in damaged[:limit]
    ]
    room = max(limit - len(rows), 0)
    rows += [(_code(digest), kernel, _WORDS[standing], _REMEDIES[standing]) for digest, kernel, standing in dead[:room]]
    rest = len(damaged) + len(dead) - len(rows)
    return [*rows, (f"{rest:,} more", "", "", "")] if rest else rows


def _code(digest: str) -> Markup:
    return Markup(f"<code>{text(digest[:12])}</code>")
