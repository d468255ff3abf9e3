"""`muse-cache report`."""

import contextlib
import os
import tempfile

import click

from cache_tools import clock
from cache_tools.describe import plural, printable
from cache_tools.opening import open_cache
from cache_tools.report import collect, report_page
from cache_tools.standing import Standings
from cache_tools.table import print_line
from cache_tools.trace import read_trace
from muse_jit.console import OK, cache_dir_option, json_option, print_json, size_text
from muse_jit.errors import UsageError


@click.command()
@click.argument("file")
@click.option("--trace", "trace_file", help="Draw this start-up trace, too: a FILE of muse-jit warmup --trace.")
@cache_dir_option
@json_option
def report(file: str, trace_file: str | None, cache_dir: str | None, as_json: bool) -> int:
    """Write one HTML page about the whole cache to FILE: pictures, with their numbers as tables.

    Where the bytes are, compile seconds by kernel, entries over time, use, registers and memory of each kernel,
    damaged and stale entries, and the start-up trace if one is given. The page loads nothing from anywhere.
    """
    layout = open_cache(cache_dir)
    trace = None if trace_file is None else read_trace(trace_file)
    found = collect(layout, Standings(layout))
    size = _write(file, report_page(layout, found, trace, clock.now()))
    document = {
        "file": os.path.abspath(file),
        "bytes": size,
        "cache_dir": layout.root,
        "entries": len(found.seen),
        "damaged": len(found.damaged),
        "dead": len(found.dead),
        "trace_events": None if trace is None else len(trace.spans),
    }
    if as_json:
        print_json(document)
    else:
        print_line(f"{printable(file)}: {size_text(size)} about {plural(len(found.seen), 'entry', 'entries')}, "
                   f"{len(found.damaged)} damaged, {len(found.dead)} dead here")  # fmt: skip
    return OK


def _write(path: str, text: str) -> int:
    """Whole or not at all. Raises `UsageError` where it cannot be written."""
    folder, data = os.path.dirname(os.path.abspath(path)), text.encode("utf-8", "replace")
    temporary = ""
    try:
        if os.path.islink(path) or (os.path.exists(path) and not os.path.isfile(path)):
            # Somebody's link stays one, and a pipe or terminal (/dev/stdout) cannot be replaced.
            with open(path, "wb") as file:
                file.write(data)
            return len(data)
        descriptor, temporary = tempfile.mkstemp(prefix=".muse_jit-", dir=folder)
        with open(descriptor, "wb") as file:
            file.write(data)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)
        os.replace(temporary, path)
    except OSError as error:
        if temporary:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        raise UsageError(f"{path} cannot be written: {error.strerror}") from None
    return len(data)
