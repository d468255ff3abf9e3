"""A cache that is the same on every machine, at a time that stands still, for tests of exact output."""

import os
import pathlib
import sys

from muse_jit.console import _run
from muse_jit.key.kernel_key import KernelKey
from muse_jit.key.source import Source
from muse_jit.key.target import Target
from muse_jit.key.toolchain import Toolchain
from muse_jit.store.layout import Layout
from muse_jit.store.publish import publish
from support import elf, toy
from support.entries import entry

NOW = 1_800_000_000.0
DAY = 86400.0
PARTS = {
    "nvidia-cutlass-dsl": {"version": "4.8.1", "python": "11" * 32},
    "nvidia-cutlass-dsl-libs-cu13": {"version": "4.8.1", "python": "22" * 32, "runtime": "sha256=33"},
    "tvm_ffi_abi": "0.1/0123456789abcdef",
}
OLD_PARTS = {**PARTS, "nvidia-cutlass-dsl": {"version": "4.8.0", "python": "44" * 32}}
SOURCE = "aa" * 32


def key(value, arch="sm_90a", kernel="toy", toolchain=None, source=SOURCE, **constants):
    """The key of a toy."""
    values = toy.ToyConstants(value=value, **constants).as_dict()
    return KernelKey(kernel, values, Target(arch, 13, "x86_64"), toolchain or PARTS, source, "support.toy:build", {})


def put(layout, of, *, age=0.0, used=None, seconds=0.25, registers=32, spill=0, content=None):
    """Publish an entry that was made `age` days ago and last used `used` days ago."""
    data = elf.cubin({"toy_kernel": (registers, spill, 1024, 256)}) if content is None else content
    artifact = elf.library(of.symbol, data)
    resources = [
        {"name": "toy_kernel", "registers": registers, "shared_bytes": 1024, "local_bytes": spill, "max_threads": 256,
         "code_bytes": 256}
    ]  # fmt: skip
    created = NOW - age * DAY
    made = entry(of, artifact, compile_seconds=seconds, created=created, resources=resources)
    publish(layout, made, artifact)
    stamp = created if used is None else NOW - used * DAY
    os.utime(os.path.join(layout.entry(of.digest), "entry.json"), (stamp, stamp))
    return made


KEYS = {
    "plain": key(1),
    "used": key(2),
    "other_arch": key(1, arch="sm_103a"),
    "spilling": key(3, behaviour="spill"),
    "old_toolchain": key(1, toolchain=OLD_PARTS),
    "old_source": key(4, source="bb" * 32),
    "other_kernel": key(5, kernel="gemm\x1b[31m"),
    "bad_digest": key(6),
    "bad_manifest": key(7),
    "incomplete": key(8),
}


def fill(root):
    """The fixed cache: seven sound entries, three damaged, and things that are nobody's."""
    layout = Layout(str(root))
    put(layout, KEYS["plain"], age=2)
    put(layout, KEYS["used"], age=40, used=1, seconds=0.5)
    put(layout, KEYS["other_arch"], age=3, seconds=0.75, registers=40)
    put(layout, KEYS["spilling"], age=0.25, seconds=12.5, registers=255, spill=64)
    put(layout, KEYS["old_toolchain"], age=100, used=90)
    put(layout, KEYS["old_source"], age=20)
    put(layout, KEYS["other_kernel"], age=5, seconds=90.0)
    for name in ("bad_digest", "bad_manifest", "incomplete"):
        put(layout, KEYS[name], age=1)
    damage(layout)
    strays = pathlib.Path(layout.entries)
    (strays / "notes.txt").write_text("mine")
    (strays / "ab").mkdir(exist_ok=True)
    (strays / "ab" / "not-a-digest").mkdir()
    return layout


def damage(layout):
    """Break three entries, each in another way."""
    folders = {name: pathlib.Path(layout.entry(KEYS[name].digest)) for name in KEYS}
    artifact = folders["bad_digest"] / "kernel.so"
    artifact.write_bytes(artifact.read_bytes()[:-1] + b"X")
    (folders["bad_manifest"] / "entry.json").write_text("[]")
    (folders["incomplete"] / "entry.json").unlink()
    for name in ("bad_manifest", "bad_digest"):
        os.utime(folders[name] / "entry.json", (NOW - DAY, NOW - DAY))
    os.utime(folders["incomplete"], (NOW - DAY, NOW - DAY))


def stand_still(monkeypatch):
    """Time, toolchain, source, machine and file system of the fixed cache, in this process."""
    monkeypatch.setattr("cache_tools.clock.now", lambda: NOW)
    monkeypatch.setattr(
        "cache_tools.standing.identify", lambda cuda, host, **_: Toolchain(13, "x86_64", PARTS, "installed")
    )
    monkeypatch.setattr("muse_jit.key.source.source_of", _source)
    monkeypatch.setattr("cache_tools.today.source_of", _source)
    monkeypatch.setattr("cache_tools.today.host_arch", lambda: "x86_64")
    monkeypatch.setattr("muse_jit.store.listing.disk_bytes", _blocks)
    monkeypatch.setattr("muse_jit.store.prune.disk_bytes", _blocks)


def _source(build, path=None, also=""):
    return Source(SOURCE, (), frozenset())


def _blocks(status):
    """Disk space of a file system with blocks of 4 KiB, whatever this one does."""
    return max(-(-status.st_size // 4096), 1) * 4096 if not status.st_mode & 0o040000 else 4096


def tool(monkeypatch, capfd, *arguments):
    """Run `muse-cache` in this process: exit code, standard output, standard error."""
    from cache_tools.cli import main

    monkeypatch.setattr(sys, "argv", ["muse-cache", *map(str, arguments)])
    capfd.readouterr()
    code = _run(main, "muse-cache")
    sys.stdout.flush()
    out, err = capfd.readouterr()
    return code, out, err
