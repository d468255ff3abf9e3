"""`muse-cache show`."""

import dataclasses
from typing import Any

import click

from cache_tools import clock
from cache_tools.describe import as_json_row
from cache_tools.details import entry_name, mix_json, print_entry, print_mix, print_resources
from cache_tools.opening import layout_of, must_exist, pick, read_whole, settings_of
from cache_tools.standing import Standings
from cache_tools.table import print_line
from muse_jit.console import FAILED, OK, cache_dir_option, json_option, print_json
from muse_jit.errors import MuseJitError, UsageError
from muse_jit.settings import Settings
from muse_jit.store.cubin import resources
from muse_jit.store.layout import Layout
from muse_jit.store.listing import Listed
from muse_jit.store.lookup import Hit, Miss


@click.command()
@click.argument("prefix")
@click.option("--resources", "want_resources", is_flag=True, help="Registers, spills, memory and instruction mix.")
@click.option("--sass", "want_sass", is_flag=True, help="Print the machine code, as the disassembler writes it.")
@click.option("--ptx", "want_ptx", is_flag=True, help="Print the PTX, if the library holds it.")
@click.option("--rebuild", is_flag=True, help="With --ptx: compile the entry again in a worker to get its PTX.")
@cache_dir_option
@json_option
def show(
    prefix: str,
    want_resources: bool,
    want_sass: bool,
    want_ptx: bool,
    rebuild: bool,
    cache_dir: str | None,
    as_json: bool,
) -> int:
    """Show one entry, named by the first digits of its digest: constants, target, toolchain, times, resources.

    With --resources, --sass or --ptx, how good the kernel is: what the GPU's machine code in the library says. The
    library is read as data and never opened as one.
    """
    if rebuild and not want_ptx:
        raise UsageError("--rebuild goes with --ptx; muse-cache verify --rebuild compares whole entries")
    settings = settings_of(cache_dir)
    layout, _ = layout_of(settings)
    must_exist(layout)
    item = pick(layout, prefix)
    standings = Standings(layout)
    code: dict[str, Any] = {}
    if want_resources or want_sass or want_ptx:
        artifact = _artifact(layout, item)
        code = _machine_code(artifact, want_resources, want_sass)
        if want_ptx:
            code["ptx"] = _ptx(artifact, rebuild, settings, standings)
    if as_json:
        shown = {name: value for name, value in code.items() if name != "_mixes"}
        print_json({**as_json_row(item), "path": item.path, **_document(item, standings), **shown})
    elif code:
        _print_code(item, code)
    else:
        print_entry(item, standings, clock.now())
    return FAILED if isinstance(item.entry, Miss) else OK


def _document(item: Listed, standings: Standings) -> dict[str, Any]:
    if isinstance(item.entry, Miss):
        return {"toolchain": None, "standing": None, "manifest": None}
    return {
        "toolchain": standings.toolchain_digest(item.entry),
        "standing": standings.of(item.entry),
        "manifest": dataclasses.asdict(item.entry),
    }


def _artifact(layout: Layout, item: Listed) -> Hit:
    """The verified bytes; those of a damaged entry are not looked into."""
    found = read_whole(layout, item.digest)
    if isinstance(found, Miss):
        raise MuseJitError(f"{item.digest[:12]} is damaged ({found.reason}: {found.detail}); its code is not looked at")
    return found


def _machine_code(found: Hit, want_resources: bool, want_sass: bool) -> dict[str, Any]:
    from cache_tools.machine_code import NoDisassembler, mixes, sass

    result: dict[str, Any] = {}
    text, missing = "", None
    if want_resources or want_sass:
        try:
            text = sass(found.artifact)
        except NoDisassembler as error:
            missing = str(error)
    if want_resources:
        result |= {"resources": resources(found.artifact), "instructions": None if missing else mix_json(mixes(text))}
        result["_mixes"] = mixes(text)
    if want_sass:
        if missing:
            raise MuseJitError(missing)
        result["sass"] = text
    return result | {"disassembler_missing": missing}


def _ptx(found: Hit, rebuild: bool, settings: Settings, standings: Standings) -> str:
    from cache_tools.machine_code import ptx

    text = ptx(found.artifact)
    if text:
        return text
    if not rebuild:
        raise MuseJitError(
            f"the library of {found.entry.digest[:12]} holds machine code only, as the compiler makes it, and no PTX; "
            "--sass shows the machine code, and --ptx --rebuild compiles it again in a worker and keeps the PTX"
        )
    from cache_tools.rebuild import recompile_ptx
    from cache_tools.today import Today

    text = recompile_ptx(found.entry, Today(settings, standings), settings)
    if not text:
        raise MuseJitError(f"the compiler wrote no PTX for {found.entry.digest[:12]}")
    return text


def _print_code(item: Listed, code: dict[str, Any]) -> None:
    """The code alone for --sass and --ptx, so that it can be piped on; a heading and tables for --resources."""
    if "resources" in code and not isinstance(item.entry, Miss):
        print_line(entry_name(item.entry), "bold")
        print_resources(code["resources"])
        if code["disassembler_missing"]:
            print_line(f"  instruction mix: {code['disassembler_missing']}", "yellow")
        else:
            print_mix(code["_mixes"])
    for name in ("sass", "ptx"):
        if name in code:
            print(code[name])
