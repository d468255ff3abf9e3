"""The verbs of `muse-cache`. None of them loads or runs what it lists; none needs a compiler, torch, tvm_ffi or GPU."""

import os
import sys
import time
from typing import Any

import click

from cache_tools.describe import as_json_row, columns, show_entry
from muse_jit import __version__
from muse_jit.console import FAILED, OK, cache_dir_option, json_option, print_json, run, size_text
from muse_jit.errors import CacheUnusable, UsageError
from muse_jit.settings import Settings
from muse_jit.store.layout import Layout, default_root
from muse_jit.store.listing import Listed, listed
from muse_jit.store.lookup import Miss


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="muse-cache")
def main() -> None:
    """See what is in muse_jit's cache of compiled kernels.

    Exit codes: 0 fine, 1 something was found damaged, 2 wrong usage, 3 the cache cannot be used for what was asked.
    """


@main.command()
@click.option("--kernel", help="Only entries of one kernel family.")
@click.option("--arch", help="Only entries for one GPU architecture.")
@cache_dir_option
@json_option
def ls(kernel: str | None, arch: str | None, cache_dir: str | None, as_json: bool) -> int:
    """List the entries: kernel, architecture, size, compile time, age, constants."""
    layout, _ = _layout(cache_dir)
    _must_exist(layout)
    items = [i for i in listed(layout) if _selected(i, kernel, arch)]
    items.sort(key=lambda i: ("", "") if isinstance(i.entry, Miss) else (i.entry.kernel, i.entry.arch))
    if as_json:
        print_json({"cache_dir": layout.root, "entries": [as_json_row(i) for i in items]})
        return OK
    now = time.time()
    _print_table([columns(i, now) for i in items], ("DIGEST", "KERNEL", "ARCH", "SIZE", "COMPILE", "AGE", "CONSTANTS"))
    print(f"{len(items)} entries, {size_text(sum(i.size for i in items))} in {layout.root}")
    return OK


@main.command()
@click.argument("prefix")
@cache_dir_option
@json_option
def show(prefix: str, cache_dir: str | None, as_json: bool) -> int:
    """Show one entry, named by the first digits of its digest: constants, target, toolchain, resources."""
    layout, _ = _layout(cache_dir)
    _must_exist(layout)
    wanted = prefix.lower()
    found = list(listed(layout, wanted)) if wanted and all(c in "0123456789abcdef" for c in wanted) else []
    if not found:
        raise UsageError(f"no entry's digest begins with {prefix!r} in {layout.root}; muse-cache ls shows them")
    if len(found) > 1:
        some = ", ".join(i.digest[: len(wanted) + 6] for i in found[:4])
        raise UsageError(f"{len(found)} entries begin with {prefix!r}: {some}{', ...' if len(found) > 4 else ''}")
    item = found[0]
    if as_json:
        print_json({**as_json_row(item), "path": item.path, "manifest": _manifest(item)})
    else:
        show_entry(item, time.time())
    return FAILED if isinstance(item.entry, Miss) else OK


@main.command()
@cache_dir_option
@json_option
def path(cache_dir: str | None, as_json: bool) -> int:
    """Print the cache folder, and with --json why it is that one."""
    layout, origin = _layout(cache_dir)
    if as_json:
        print_json({"cache_dir": layout.root, "origin": origin, "exists": os.path.isdir(layout.root)})
    else:
        print(layout.root)
    return OK


def _layout(cache_dir: str | None) -> tuple[Layout, str]:
    settings = Settings.from_environ().with_options(cache_dir=cache_dir)
    root, origin = default_root(settings.cache_dir, settings.vllm_cache_root)
    return Layout(root, settings.share), settings.origins.get("cache_dir", origin) if settings.cache_dir else origin


def _must_exist(layout: Layout) -> None:
    if not os.path.isdir(layout.root):
        raise CacheUnusable(f"there is no cache folder {layout.root}; fill one with: muse-jit warmup")
    if not os.access(layout.root, os.R_OK | os.X_OK):
        raise CacheUnusable(f"the cache folder {layout.root} cannot be read by this user")


def _selected(item: Listed, kernel: str | None, arch: str | None) -> bool:
    if isinstance(item.entry, Miss):
        return kernel is None and arch is None
    return kernel in (None, item.entry.kernel) and arch in (None, item.entry.arch)


def _manifest(item: Listed) -> Any:
    import dataclasses

    return None if isinstance(item.entry, Miss) else dataclasses.asdict(item.entry)


def _print_table(rows: list[tuple[str, ...]], head: tuple[str, ...]) -> None:
    """Columns as wide as their content; on a terminal, lines are cut at its width."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    limit = None
    if sys.stdout.isatty():
        import shutil

        limit = shutil.get_terminal_size().columns
    for row in [head, *rows]:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        print(line if limit is None or len(line) <= limit else line[: max(limit - 1, 1)] + "…")


def entry() -> None:
    """The console script."""
    run(main, "muse-cache")


if __name__ == "__main__":
    entry()
