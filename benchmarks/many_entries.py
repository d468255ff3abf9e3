"""What a large cache costs: look-up, listing and pruning at 100 and at 100,000 entries; 5,000 kernels in one process.

    python benchmarks/many_entries.py [--entries 100000] [--kernels 5000] [--json FILE]

No compiler and no GPU: the entries are of a C function, linked once. Look-up times are medians; the small and the
large cache alternate, so that the machine's noise hits both alike.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "tests"))

from support import entries, toy

from muse_jit.key.encoding import content_digest
from muse_jit.service import JitService
from muse_jit.settings import Settings
from muse_jit.store import layout as layout_module
from muse_jit.store.layout import Layout
from muse_jit.store.listing import listed
from muse_jit.store.lookup import Hit, find
from muse_jit.store.prune import prune
from muse_jit.store.publish import publish


def fill(root: str, count: int) -> Layout:
    """A cache of `count` entries, published without flushing, which is all that is slow."""
    layout = Layout(root)
    for value in range(count):
        publish(layout, entries.entry(entries.key(value)), entries.ARTIFACT)
    return layout


def look_up(layout: Layout, value: int) -> float:
    """Seconds of one verified look-up."""
    key = entries.key(value)
    _ = key.digest
    started = time.perf_counter()
    found = find(layout, key)
    seconds = time.perf_counter() - started
    assert isinstance(found, Hit)
    return seconds


def caches(folder: str, count: int) -> dict[str, float]:
    """Compare a cache of 100 entries with one of `count`."""
    small, large = fill(f"{folder}/small", 100), fill(f"{folder}/large", count)
    times: dict[str, list[float]] = {"small": [], "large": []}
    for turn in range(500):
        times["small"].append(look_up(small, turn % 100))
        times["large"].append(look_up(large, turn * 199 % count))
    started = time.perf_counter()
    assert sum(1 for _ in listed(large)) == count
    listing = time.perf_counter() - started
    started = time.perf_counter()
    report = prune(large, max_bytes=1 << 20)
    return {
        "entries": count,
        "look_up_among_100_us": statistics.median(times["small"]) * 1e6,
        "look_up_among_all_us": statistics.median(times["large"]) * 1e6,
        "list_seconds": listing,
        "prune_seconds": time.perf_counter() - started,
        "pruned": len(report.removed),
    }


def usage() -> tuple[int, int, int]:
    """Threads, open descriptors, resident KiB of this process."""
    text = pathlib.Path("/proc/self/status").read_text()
    resident = next(int(line.split()[1]) for line in text.splitlines() if line.startswith("VmRSS"))
    return threading.active_count(), len(os.listdir("/proc/self/fd")), resident


def kernels(folder: str, count: int) -> dict[str, list[tuple[int, int, int]]]:
    """Look up, then load, `count` kernels in this process; its use of resources after 1/5 and after all of them."""
    settings = Settings().with_options(cache_dir=f"{folder}/kernels", mode="auto")
    service = JitService("sm_90a", settings)
    first = service.obtain(toy.ToyConstants(value=7)).hit.entry
    toys = [toy.ToyConstants(value=1000 + n) for n in range(count)]
    keys = [service.key_of(t)[1] for t in toys]
    toy._Object(7).export_to_c(f"{folder}/k.o", function_name=first.symbol)
    names = [f"-Wl,--defsym=__tvm_ffi_{k.symbol}=__tvm_ffi_{first.symbol}" for k in keys]
    # Few keys a library, or 5,000 copies of 5,000 names would be what is measured.
    for start in range(0, count, 50):
        part = names[start : start + 50]
        command = ["cc", "-shared", "-nostdlib", "-s", "-o", f"{folder}/k.so", f"{folder}/k.o", *part]
        subprocess.run(command, check=True)
        artifact = pathlib.Path(folder, "k.so").read_bytes()
        same = {"artifact_digest": content_digest(artifact), "artifact_size": len(artifact)}
        for key in keys[start : start + 50]:
            entry = dataclasses.replace(first, digest=key.digest, key=key.document, symbol=key.symbol, **same)
            publish(service.layout, entry, artifact)
    service = JitService("sm_90a", settings.with_options(mode="forbid"))
    result: dict[str, list[tuple[int, int, int]]] = {"obtain": [], "get": []}
    for what, use in (("obtain", service.obtain), ("get", service.get)):
        for number, constants in enumerate(toys):
            use(constants)
            if number in (count // 5 - 1, count - 1):
                result[what].append(usage())
    return result


def main() -> None:
    """Measure and print, or write, JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--entries", type=int, default=100_000)
    parser.add_argument("--kernels", type=int, default=5_000)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    os.fsync = layout_module.os.fsync = lambda descriptor: None  # type: ignore[assignment]
    with tempfile.TemporaryDirectory() as folder:
        result = {
            "python": platform.python_version(),
            "cpus": len(os.sched_getaffinity(0)),
            "caches": caches(folder, arguments.entries),
            "kernels": {
                "count": arguments.kernels,
                "threads_descriptors_resident_kib": kernels(folder, arguments.kernels),
            },
        }
    text = json.dumps(result, indent=1)
    if arguments.json:
        pathlib.Path(arguments.json).write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
