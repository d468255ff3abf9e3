"""Compile an entry again in a worker process, from nothing but what entry.json says. The tools' one door to the
compiler; it is opened by `--rebuild` only."""

import dataclasses
import glob
import os
import tempfile

from cache_tools.today import Today
from muse_jit.compiler.build import Built, build
from muse_jit.errors import MuseJitError, UsageError
from muse_jit.key.difference import difference
from muse_jit.key.toolchain import runtime_library
from muse_jit.settings import Settings
from muse_jit.store.entry import Entry


class NotRebuildable(MuseJitError):
    """Compiling it here would give another kernel: one line says which part of the key is no longer installed."""


def recompile(entry: Entry, today: Today, settings: Settings, dump: dict[str, str] | None = None) -> Built:
    """The kernel of an entry, compiled anew. `dump` are options of the DSL that make it write files, not other code.

    Raises:
        NotRebuildable: the family, toolchain or source of the entry is not what is installed.
        CompileError, LinkerMissing, ToolchainError: it cannot be compiled here.
    """
    try:
        family, constants, key = today.key_of_entry(entry)
    except UsageError as error:
        raise NotRebuildable(str(error)) from None
    if key.digest != entry.digest:
        parts = sorted({d.part.partition(".")[0] for d in difference(entry.key, key.document)})
        raise NotRebuildable(f"another {' and '.join(parts)} is installed now")
    if not today.installed():
        raise NotRebuildable("no compiler is installed")
    return build(
        family,
        constants,
        dataclasses.replace(key, options={**key.options, **(dump or {})}) if dump else key,
        runtime_library=runtime_library(key.target.cuda, settings.runtime_lib),
        source=today.source(family),
        timeout=settings.compile_timeout,
        cc=settings.cc,
    )


def recompile_ptx(entry: Entry, today: Today, settings: Settings) -> str:
    """The PTX that the compiler makes of an entry on its way; empty if it writes none.

    Raises: as `recompile`.
    """
    with tempfile.TemporaryDirectory(prefix="muse_jit-", ignore_cleanup_errors=True) as folder:
        recompile(entry, today, settings, {"KEEP": "ptx", "DUMP_DIR": folder})
        texts = []
        for path in sorted(glob.glob(os.path.join(glob.escape(folder), "**", "*.ptx"), recursive=True)):
            with open(path, encoding="utf-8", errors="replace") as file:
                texts.append(file.read().rstrip("\0\n"))
    return "\n".join(texts)
