"""What every verb begins with: which cache folder, whether it is there, and the entry that a prefix means."""

import os

from muse_jit.errors import CacheUnusable, UsageError
from muse_jit.key.encoding import KeyDigest
from muse_jit.settings import Settings
from muse_jit.store.layout import Layout, default_root
from muse_jit.store.listing import Listed, listed
from muse_jit.store.lookup import Hit, Miss, read_entry


def settings_of(cache_dir: str | None) -> Settings:
    """The environment's settings with the option `--cache-dir`.

    Raises:
        UsageError: a variable is malformed.
    """
    return Settings.from_environ().with_options(cache_dir=cache_dir)


def layout_of(settings: Settings) -> tuple[Layout, str]:
    """The cache folder, and why it is that one."""
    root, origin = default_root(settings.cache_dir, settings.vllm_cache_root)
    return Layout(root, settings.share), settings.origins.get("cache_dir", origin) if settings.cache_dir else origin


def open_cache(cache_dir: str | None) -> Layout:
    """The cache folder of a verb that reads it.

    Raises:
        CacheUnusable: there is none, or this user may not read it.
    """
    layout, _ = layout_of(settings_of(cache_dir))
    must_exist(layout)
    return layout


def must_exist(layout: Layout) -> None:
    """Raises `CacheUnusable` where there is no folder that this user can read."""
    if not os.path.isdir(layout.root):
        raise CacheUnusable(f"there is no cache folder {layout.root}; fill one with: muse-jit warmup")
    if not os.access(layout.root, os.R_OK | os.X_OK):
        raise CacheUnusable(f"the cache folder {layout.root} cannot be read by this user")


def must_be_cache(layout: Layout) -> None:
    """Raises `CacheUnusable` for a folder of something else, before anything in it is deleted."""
    if not layout.is_cache():
        raise CacheUnusable(f"{layout.root} has no entries of muse_jit; is it the right folder? Nothing was touched")


def is_prefix(text: str) -> bool:
    """Whether a text can be the beginning of a digest."""
    return 0 < len(text) <= 64 and all(c in "0123456789abcdef" for c in text.lower())


def pick(layout: Layout, prefix: str) -> Listed:
    """The one entry whose digest begins with `prefix`.

    Raises:
        UsageError: there is none, or there are several; names some.
    """
    wanted = prefix.lower()
    found = list(listed(layout, wanted)) if is_prefix(wanted) else []
    if not found:
        raise UsageError(f"no entry's digest begins with {prefix!r} in {layout.root}; muse-cache ls shows them")
    if len(found) > 1:
        some = ", ".join(i.digest[: len(wanted) + 6] for i in found[:4])
        raise UsageError(f"{len(found)} entries begin with {prefix!r}: {some}{', ...' if len(found) > 4 else ''}")
    return found[0]


def read_whole(layout: Layout, digest: KeyDigest) -> Hit | Miss:
    """An entry with its verified bytes; one that is pruned or replaced while it is read is not taken for damaged.

    What is half deleted lies elsewhere already: a second look finds its successor, or nothing.
    """
    found = read_entry(layout, digest)
    return found if isinstance(found, Hit) else read_entry(layout, digest)
