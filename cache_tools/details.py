"""One entry in full, and its machine code in numbers."""

from typing import Any

from cache_tools.describe import age_text, damage_text, printable, seconds_text, used_text, value_text
from cache_tools.machine_code import Mix
from cache_tools.standing import DEAD, Standing, Standings
from cache_tools.table import print_line, print_table
from muse_jit.console import size_text
from muse_jit.store.entry import Entry
from muse_jit.store.listing import Listed
from muse_jit.store.lookup import Miss

STANDINGS = {
    Standing.CURRENT: "a look-up with what is installed here finds it",
    Standing.TOOLCHAIN: "dead here: made by another toolchain than the installed one",
    Standing.SOURCE: "dead here: the kernel's source changed since it was made",
    Standing.UNKNOWN: "not known here: kernel family or toolchain are not installed",
}


def print_entry(item: Listed, standings: Standings, now: float) -> None:
    """Print everything an entry says about itself."""
    print_line(f"digest     {item.digest}")
    print_line(f"path       {printable(item.path)}")
    if isinstance(item.entry, Miss):
        print_line(f"damaged    {damage_text(item.entry)}", "red")
        print_line("           it is never loaded; whoever asks for it compiles it again and sets this one aside")
        return
    entry = item.entry
    standing = standings.of(entry)
    print_line(f"kernel     {printable(entry.kernel)}  (built by {printable(entry.key.get('build'))})")
    target = "  ".join(f"{printable(n)} {printable(v)}" for n, v in entry.key["target"].items())
    print_line(f"target     {target}")
    print_line(f"created    {age_text(now - entry.created)} ago by {printable(entry.created_by)}")
    used = used_text(item, now)
    print_line(f"used       {'not since the day it was made, as far as is recorded' if used == '-' else used + ' ago'}")
    print_line(f"times      compile {seconds_text(entry.compile_seconds)}, link {seconds_text(entry.link_seconds)}")
    print_line(
        f"size       {size_text(item.size)}, {size_text(item.disk)} on disk; kernel {size_text(entry.artifact_size)}, "
        f"sha256 {printable(entry.artifact_digest)}"
    )
    print_line(f"standing   {STANDINGS[standing]}", "yellow" if standing in DEAD else None)
    _print_values("constants", entry.key["constants"])
    _print_values("options", entry.key["options"])
    print_line(f"toolchain  {standings.toolchain_digest(entry)[:12]}")
    for name, part in entry.key["toolchain"].items():
        text = f"{part.get('version')}  {str(part.get('python'))[:12]}" if isinstance(part, dict) else part
        print_line(f"  {printable(name):28} {printable(text)}")
    print_line(f"source     {printable(entry.key.get('source'))}")
    print("resources")
    print_resources(entry.resources)


def _print_values(title: str, values: dict[str, Any]) -> None:
    print_line(title + ("" if values else "  (none)"))
    for name, value in values.items():
        print_line(f"  {printable(name):28} {value_text(value)}")


RESOURCES = ("registers", "local_bytes", "shared_bytes", "code_bytes", "max_threads")
RESOURCE_HEADS = ("REGISTERS", "STACK+SPILL", "SHARED", "CODE", "MAX THREADS")


def resource_cells(kernel: dict[str, Any]) -> list[str]:
    """Registers, local memory (stack and spills), shared memory, code and thread limit of one GPU kernel."""
    units = ("", " B", " B", " B", "")
    values = (kernel.get(name) for name in RESOURCES)
    return ["-" if value is None else f"{printable(value)}{unit}" for value, unit in zip(values, units, strict=True)]


def print_resources(resources: list[dict[str, Any]], indent: str = "  ") -> None:
    """The resource usage of the GPU kernels of one library, as a table."""
    if not resources:
        print(f"{indent}(none recorded: the library holds no GPU code that could be read)")
        return
    rows = [[*resource_cells(k), printable(k.get("name"))] for k in resources]
    print_table((*RESOURCE_HEADS, "GPU KERNEL"), rows, right=RESOURCE_HEADS, indent=indent, optional=("MAX THREADS",))


def print_mix(mixes: list[Mix], indent: str = "  ") -> None:
    """The instruction mix of GPU kernels: by class, with the mnemonics of each."""
    from cache_tools.machine_code import class_of

    for mix in mixes:
        total = sum(mix.counts.values())
        print_line(f"{indent}{total} instructions in {_short(printable(mix.name))}")
        rows = []
        for name, count in sorted(mix.classes.items(), key=lambda pair: -pair[1]):
            inside = [f"{m} {n}" for m, n in mix.counts.most_common() if class_of(m) == name]
            rows.append((name, str(count), f"{100 * count / total:.0f} %", ", ".join(inside)))
        print_table(("CLASS", "COUNT", "SHARE", "INSTRUCTIONS"), rows, right=("COUNT", "SHARE"), indent=indent + "  ")


def _short(name: str) -> str:
    """A GPU kernel's name carries its operands' types; what tells two of one library apart stands at its end."""
    return name if len(name) <= 64 else f"{name[:48]}...{name[-12:]}"


def mix_json(mixes: list[Mix]) -> list[dict[str, Any]]:
    """The fields of `instructions` in JSON."""
    return [
        {"name": m.name, "total": sum(m.counts.values()), "classes": m.classes, "mnemonics": dict(m.counts)}
        for m in mixes
    ]


def entry_name(entry: Entry) -> str:
    """ "row_norm sm_90a 57c30d2a91be": how a verb names an entry in a sentence."""
    return f"{printable(entry.kernel)} {printable(entry.arch)} {entry.digest[:12]}"
