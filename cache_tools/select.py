"""Which entries a verb is about: by kernel, architecture, age, size, toolchain."""

import dataclasses
from collections.abc import Callable
from typing import Any

import click

from cache_tools.opening import is_prefix
from cache_tools.quantities import age, size
from cache_tools.standing import Standings
from muse_jit.errors import UsageError
from muse_jit.store.listing import Listed
from muse_jit.store.lookup import Miss

STALE, CURRENT = "stale", "current"


@dataclasses.dataclass(frozen=True)
class Selection:
    """What an entry must be; None lets everything through. A damaged entry, of which only size and stamp are known,
    fits when no question is asked about the rest."""

    kernel: str | None = None
    arch: str | None = None
    older_than: float | None = None
    """Seconds since its last use, or since it was made if it was not used."""
    newer_than: float | None = None
    larger_than: int | None = None
    """Bytes of its files."""
    smaller_than: int | None = None
    toolchain: str | None = None
    """ "stale", "current", or the first digits of a toolchain's digest."""

    def __post_init__(self) -> None:
        if self.toolchain not in (None, STALE, CURRENT) and not is_prefix(str(self.toolchain)):
            raise UsageError(
                f"--toolchain {self.toolchain!r}; it must be stale, current, or the first digits of a toolchain's "
                "digest (muse-cache stats shows them)"
            )

    def fits(self, item: Listed, standings: Standings, now: float) -> bool:
        """Whether an entry is meant."""
        age = None if item.last_used is None else abs(now - item.last_used)
        if self.older_than is not None and (age is None or age <= self.older_than):
            return False
        if self.newer_than is not None and (age is None or age >= self.newer_than):
            return False
        if self.larger_than is not None and item.size <= self.larger_than:
            return False
        if self.smaller_than is not None and item.size >= self.smaller_than:
            return False
        if isinstance(item.entry, Miss):
            return self.kernel is self.arch is self.toolchain is None
        if self.kernel not in (None, item.entry.kernel) or self.arch not in (None, item.entry.arch):
            return False
        return self.toolchain is None or self._of_toolchain(item, standings)

    def _of_toolchain(self, item: Listed, standings: Standings) -> bool:
        assert not isinstance(item.entry, Miss)
        assert self.toolchain is not None
        if self.toolchain in (STALE, CURRENT):
            target = item.entry.key["target"]
            installed = standings.installed(target.get("cuda"), target.get("host"))
            if installed is None:
                return False  # nothing here says which is which
            return (standings.toolchain_digest(item.entry) != installed) == (self.toolchain == STALE)
        return standings.toolchain_digest(item.entry).startswith(self.toolchain.lower())


TOOLCHAIN_HELP = "stale (made by another toolchain than the installed one), current, or a digest's first digits."


def selection_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options of a verb that lists a part of the cache."""
    options = (
        click.option("--kernel", help="Only entries of one kernel family."),
        click.option("--arch", help="Only entries for one GPU architecture."),
        click.option(
            "--older-than", metavar="AGE", callback=age, help="Only those last used, or made, longer ago: 12h, 30d, 2w."
        ),
        click.option("--newer-than", metavar="AGE", callback=age, help="Only those last used, or made, since then."),
        click.option("--larger-than", metavar="SIZE", callback=size, help="Only larger ones: 100K, 1M."),
        click.option("--smaller-than", metavar="SIZE", callback=size, help="Only smaller ones."),
        click.option("--toolchain", help="Only " + TOOLCHAIN_HELP),
    )
    for option in reversed(options):
        function = option(function)
    return function
