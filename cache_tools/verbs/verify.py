"""`muse-cache verify`."""

import dataclasses
import sys
from collections.abc import Iterator
from typing import Any

import click

from cache_tools.describe import damage_text, plural, printable
from cache_tools.library import BadLibrary, check_library
from cache_tools.opening import is_prefix, layout_of, must_exist, read_whole, settings_of
from cache_tools.standing import Standings
from cache_tools.table import print_line
from muse_jit.console import FAILED, OK, cache_dir_option, json_option, print_json, size_text
from muse_jit.errors import MuseJitError, UsageError
from muse_jit.key.encoding import KeyDigest, key_digest
from muse_jit.settings import Settings
from muse_jit.store.layout import Layout
from muse_jit.store.listing import digests
from muse_jit.store.lookup import Hit, Miss, Reason, read_manifest


@dataclasses.dataclass
class Checked:
    """What checking one entry came to."""

    digest: KeyDigest
    kernel: str | None
    arch: str | None
    status: str
    """ "ok", "damaged", "differs" (compiling again gave other bytes), "gone" (pruned meanwhile)."""
    detail: str = ""
    rebuilt: str | None = None
    """With --rebuild: "same", "differs", or why it was not compiled."""
    size: int = 0


@click.command()
@click.argument("prefixes", nargs=-1)
@click.option("--rebuild", is_flag=True, help="Compile each again in a worker process and compare the bytes.")
@cache_dir_option
@json_option
def verify(prefixes: tuple[str, ...], rebuild: bool, cache_dir: str | None, as_json: bool) -> int:
    """Check every entry, or those whose digests begin with PREFIXES: names each damaged one and exits with 1.

    Checked are owner and mode, the manifest, the digest of the stored key against the entry's name, size and SHA-256
    of the library, and that it is an ELF library of its machine that exports the kernel. With --rebuild each entry
    is compiled again, as far as its toolchain and source are still installed, and must come out byte for byte.
    """
    settings = settings_of(cache_dir)
    layout, _ = layout_of(settings)
    must_exist(layout)
    for prefix in prefixes:
        if not is_prefix(prefix) or next(digests(layout, prefix.lower()), None) is None:
            raise UsageError(f"no entry's digest begins with {prefix!r} in {layout.root}; muse-cache ls shows them")
    rebuilder = _Rebuilder(layout, settings) if rebuild else None
    found = []
    for checked in _check_all(layout, prefixes, rebuilder):
        found.append(checked)
        if not as_json:
            _print(checked, rebuild)
    bad = [c for c in found if c.status != "ok"]
    if as_json:
        print_json(_document(layout, found, bad))
    else:
        rebuilt = f", {sum(c.rebuilt == 'same' for c in found)} rebuilt byte for byte" if rebuild else ""
        print_line(f"{plural(len(found), 'entry', 'entries')}, {size_text(sum(c.size for c in found))}: "
                   f"{len(found) - len(bad)} ok, {len(bad)} damaged{rebuilt}", "red" if bad else "green")  # fmt: skip
        if bad:
            print_line("damaged entries are never loaded; muse-cache prune --damaged removes them")
    return FAILED if bad else OK


def check(layout: Layout, digest: KeyDigest) -> tuple[Checked, Hit | None]:
    """Check one entry; a verified one comes with its bytes."""
    found = read_whole(layout, digest)
    if isinstance(found, Miss) and found.reason == Reason.ABSENT:
        return Checked(digest, None, None, "gone"), None
    if isinstance(found, Miss):
        entry = read_manifest(layout, digest)  # which may be whole although the library is not
        kernel, arch = (None, None) if isinstance(entry, Miss) else (entry.kernel, entry.arch)
        return Checked(digest, kernel, arch, "damaged", damage_text(found)), None
    entry = found.entry
    checked = Checked(digest, entry.kernel, entry.arch, "ok", size=len(found.artifact))
    problem = _problem(found, digest)
    if problem:
        checked.status, checked.detail = "damaged", problem
        return checked, None
    return checked, found


def _problem(found: Hit, digest: KeyDigest) -> str:
    # Reading derived the digest before; derived once more, so that this does not rest on how reading does it.
    if key_digest(found.entry.key) != digest:
        return f"{Reason.FOREIGN_KEY}: the digest of the stored key is not the entry's name"
    try:
        check_library(found.artifact, str(found.entry.key["target"].get("host")), found.entry.symbol)
    except BadLibrary as error:
        return f"{Reason.UNLOADABLE}: {printable(error)}"
    return ""


def _check_all(layout: Layout, prefixes: tuple[str, ...], rebuilder: "_Rebuilder | None") -> Iterator[Checked]:
    for prefix in dict.fromkeys(p.lower() for p in prefixes) or ("",):
        for digest in digests(layout, prefix):
            checked, found = check(layout, digest)
            if checked.status == "gone":
                continue  # pruned this very moment
            if rebuilder is not None and found is not None:
                rebuilder.compare(found, checked)
            yield checked


class _Rebuilder:
    """Compiles entries again and compares the bytes."""

    def __init__(self, layout: Layout, settings: Settings) -> None:
        from cache_tools.today import Today

        self._settings = settings
        self._today = Today(settings, Standings(layout))

    def compare(self, found: Hit, checked: Checked) -> None:
        """Note in `checked` what compiling came to."""
        from cache_tools.rebuild import NotRebuildable, recompile

        try:
            artifact = recompile(found.entry, self._today, self._settings).artifact
        except NotRebuildable as error:
            checked.rebuilt = f"not compiled: {error}"
            return
        except MuseJitError as error:
            checked.rebuilt, checked.status, checked.detail = (
                f"failed: {error}",
                "differs",
                f"compiling it failed: {error}",
            )
            return
        checked.rebuilt = "same" if artifact == found.artifact else "differs"
        if checked.rebuilt == "differs":
            checked.status = "differs"
            checked.detail = f"compiling it again gave other bytes ({_first_difference(found.artifact, artifact)})"


def _first_difference(old: bytes, new: bytes) -> str:
    if len(old) != len(new):
        return f"{len(new)} instead of {len(old)} bytes"
    at = next(i for i, (a, b) in enumerate(zip(old, new, strict=True)) if a != b)
    return f"{sum(a != b for a, b in zip(old, new, strict=True))} bytes, the first at {at}"


def _print(checked: Checked, rebuild: bool) -> None:
    """One line for each entry that is not well; with --rebuild, which takes its time, for each."""
    name = f"{checked.digest[:12]}  {printable(checked.kernel or '?')} {printable(checked.arch or '')}".rstrip()
    if checked.status != "ok":
        print_line(f"{checked.status}  {name}  {printable(checked.detail)}", "red")
    elif rebuild:
        print_line(f"{'ok' if checked.rebuilt == 'same' else 'skipped'}  {name}  {printable(checked.rebuilt)}")
    sys.stdout.flush()


def _document(layout: Layout, found: list[Checked], bad: list[Checked]) -> dict[str, Any]:
    return {
        "cache_dir": layout.root,
        "checked": len(found),
        "ok": len(found) - len(bad),
        "damaged": len(bad),
        "entries": [dataclasses.asdict(c) for c in found],
    }
