"""Entries in words: rows for tables, rows for JSON, and one entry in full."""

from typing import Any

from muse_jit.console import size_text
from muse_jit.store.listing import Listed
from muse_jit.store.lookup import Miss


def as_json_row(item: Listed) -> dict[str, Any]:
    """The fields of one entry in `ls --json`. A damaged entry has only digest, size and `damaged`."""
    if isinstance(item.entry, Miss):
        return {
            "digest": item.digest,
            "kernel": None,
            "arch": None,
            "cuda": None,
            "host": None,
            "size": item.size,
            "compile_s": None,
            "link_s": None,
            "created": None,
            "constants": None,
            "damaged": f"{item.entry.reason}: {item.entry.detail}",
        }
    entry = item.entry
    return {
        "digest": item.digest,
        "kernel": entry.kernel,
        "arch": entry.arch,
        "cuda": entry.key["target"].get("cuda"),
        "host": entry.key["target"].get("host"),
        "size": item.size,
        "compile_s": entry.compile_seconds,
        "link_s": entry.link_seconds,
        "created": entry.created,
        "constants": entry.key.get("constants"),
        "damaged": None,
    }


def columns(item: Listed, now: float) -> tuple[str, ...]:
    """One row of the table: digest, kernel, architecture, size, compile time, age, constants."""
    if isinstance(item.entry, Miss):
        return (
            item.digest[:12],
            "(damaged)",
            "-",
            size_text(item.size),
            "-",
            "-",
            f"{item.entry.reason}: {item.entry.detail}",
        )
    entry = item.entry
    return (
        item.digest[:12],
        printable(entry.kernel),
        printable(entry.arch),
        size_text(item.size),
        f"{entry.compile_seconds:.2f} s",
        age_text(now - entry.created),
        constants_text(entry.key.get("constants")),
    )


def show_entry(item: Listed, now: float) -> None:
    """Print everything an entry says about itself."""
    print(f"digest     {item.digest}")
    print(f"path       {item.path}")
    if isinstance(item.entry, Miss):
        print(f"damaged    {item.entry.reason}: {item.entry.detail}")
        return
    entry = item.entry
    target = entry.key["target"]
    print(f"kernel     {printable(entry.kernel)}  (built by {printable(entry.key.get('build'))})")
    print("target     " + "  ".join(f"{name} {printable(value)}" for name, value in target.items()))
    print(f"created    {age_text(now - entry.created)} ago by {printable(entry.created_by)}")
    print(f"times      compile {entry.compile_seconds:.3f} s, link {entry.link_seconds:.3f} s")
    print(f"artifact   {size_text(entry.artifact_size)}, sha256 {entry.artifact_digest}")
    for title in ("constants", "options"):
        values = entry.key.get(title) or {}
        print(title + ("" if values else "  (none)"))
        for name, value in values.items():
            print(f"  {printable(name):28} {printable(value)}")
    print("toolchain")
    for name, part in (entry.key.get("toolchain") or {}).items():
        text = f"{part.get('version')}  {str(part.get('python'))[:12]}" if isinstance(part, dict) else part
        print(f"  {printable(name):28} {printable(text)}")
    print(f"source     {printable(entry.key.get('source'))}")
    print("resources")
    for kernel in entry.resources:
        print(f"  {printable(kernel.get('name'))}")
        print(
            f"    registers {kernel.get('registers')}, shared {kernel.get('shared_bytes')} B, "
            f"local {kernel.get('local_bytes')} B, code {kernel.get('code_bytes')} B"
        )


def constants_text(constants: Any) -> str:
    """ "eps=1e-05 hidden=8192 ...": in one line, switches by name only when on."""
    if not isinstance(constants, dict):
        return "?"
    parts = []
    for name, value in constants.items():
        if value is True:
            parts.append(printable(name))
        elif value is not False:
            parts.append(f"{printable(name)}={printable(value)}")
    return " ".join(parts)


def age_text(seconds: float) -> str:
    """Seconds for people; a time in the future, after a clock step, counts as now."""
    value = max(seconds, 0.0)
    for unit, length in (("s", 60.0), ("min", 60.0), ("h", 24.0)):
        if value < length:
            return f"{value:.0f} {unit}"
        value /= length
    return f"{value:.0f} d"


def printable(value: Any) -> str:
    """Text from a manifest without control characters, which a terminal would obey."""
    return "".join(c if c.isprintable() else "?" for c in str(value))
