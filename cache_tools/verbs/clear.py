"""`muse-cache clear`."""

import sys

import click

from cache_tools.describe import plural, printable
from cache_tools.opening import layout_of, must_be_cache, must_exist, settings_of
from cache_tools.verbs.prune import as_document, print_sums, run
from muse_jit.console import FAILED, OK, cache_dir_option, json_option, print_json, size_text
from muse_jit.errors import UsageError
from muse_jit.store.prune import usages


@click.command()
@click.option("--yes", is_flag=True, help="Do not ask.")
@cache_dir_option
@json_option
def clear(yes: bool, cache_dir: str | None, as_json: bool) -> int:
    """Delete all entries. Asks first, unless --yes.

    Touches only what this cache made: entries, by the same steps as prune, and what was set aside or left behind.
    Lock files stay, for a process may hold one; so does any file that somebody else put there, and the folder.
    """
    layout, _ = layout_of(settings_of(cache_dir))
    must_exist(layout)
    must_be_cache(layout)
    found = usages(layout)
    if not yes:
        if as_json or not sys.stdin.isatty():
            raise UsageError("clear asks before it deletes, and nobody can answer here; say --yes")
        what = f"{plural(len(found), 'entry', 'entries')}, {size_text(sum(u.size for u in found))}"
        if not click.confirm(f"Delete {what} in {printable(layout.root)}?", err=True):
            print("nothing was deleted")
            return OK
    report = run(layout, 0, None, None, False, everything=True)
    if as_json:
        print_json(as_document(layout, report, False))
    else:
        print_sums(layout, report, False)
    return FAILED if report.busy else OK
