"""`muse-cache path`."""

import os
import sys

import click

from cache_tools.opening import layout_of, settings_of
from muse_jit.console import OK, cache_dir_option, json_option, print_json


@click.command()
@cache_dir_option
@json_option
def path(cache_dir: str | None, as_json: bool) -> int:
    """Print the cache folder, and with --json why it is that one."""
    layout, origin = layout_of(settings_of(cache_dir))
    if as_json:
        print_json({"cache_dir": layout.root, "origin": origin, "exists": os.path.isdir(layout.root)})
    else:
        # Byte for byte: a shell uses it, also where the locale cannot write the name.
        sys.stdout.flush()
        sys.stdout.buffer.write(os.fsencode(layout.root) + b"\n")
    return OK
