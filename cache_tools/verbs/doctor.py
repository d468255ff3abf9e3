"""`muse-cache doctor`."""

import dataclasses
from collections.abc import Iterator

import click

from cache_tools.describe import printable
from cache_tools.health import FAIL, Check, folder_checks
from cache_tools.opening import layout_of, settings_of
from cache_tools.table import coloured
from muse_jit.console import FAILED, OK, cache_dir_option, json_option, print_json

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


@click.command()
@cache_dir_option
@json_option
def doctor(cache_dir: str | None, as_json: bool) -> int:
    """Check what the cache needs of this machine: each line is ok, warn or fail, with what to do about it.

    Checked are the folder, its owner, mode and file system, whether locks and renames work and memory may be
    executed, free space and inodes, linker, toolchain (its installed bytes, too), runtime library and driver.
    Exit code 1 when a line says fail. Nothing is changed; a trial folder below the cache is removed again.
    """
    checks = []
    for check in _checks(cache_dir):
        checks.append(check)
        if not as_json:
            _print(check)
    failed = sum(c.status == FAIL for c in checks)
    if as_json:
        print_json({"checks": [dataclasses.asdict(c) for c in checks], "failed": failed})
    return FAILED if failed else OK


def _checks(cache_dir: str | None) -> Iterator[Check]:
    settings = settings_of(cache_dir)
    layout, origin = layout_of(settings)
    yield from folder_checks(layout, origin, settings)
    from cache_tools.health_machine import machine_checks

    yield from machine_checks(layout, settings)


def _print(check: Check) -> None:
    """Whole lines, however narrow the terminal: a remedy that is cut off helps nobody."""
    remedy = f"; to do: {check.remedy}" if check.remedy else ""
    status = coloured(f"{check.status:4}", _COLOURS[check.status])
    print(f"{status}  {check.name:11}  {printable(check.message + remedy)}", flush=True)
