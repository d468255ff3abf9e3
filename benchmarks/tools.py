"""What `muse-cache` costs as a whole process: --help, ls of 1,000 entries, and both and stats at 100,000.

    python benchmarks/tools.py [--entries 100000] [--turns 7] [--json FILE]

No compiler and no GPU. The entries are of the size that real ones have (two kilobytes of manifest, a lock file each)
and carry the toolchain that is installed, as after filling a cache on this machine. Each figure is the median over
whole processes, from start to end, and the peak of their memory; small and large cache take turns, so that the
machine's noise hits both alike, and so does the bare interpreter, whose start is in every figure.
"""

import argparse
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "tests"))

from support import elf, entries

from muse_jit.constants.row_norm import RowNormConstants
from muse_jit.key.target import host_arch
from muse_jit.key.toolchain import identify
from muse_jit.store.layout import Layout
from muse_jit.store.publish import publish

ENTRY = "import sys; from cache_tools.cli import entry; entry()"


def fill(root: str, count: int) -> Layout:
    """A cache of `count` entries, published without flushing, which is all that is slow."""
    layout = Layout(root)
    toolchain = identify(None, host_arch())
    constants = RowNormConstants(hidden=8192, eps=1e-5, has_weight=True).as_dict()
    gpu = {"name": "kernel_" + "x" * 180, "registers": 64, "shared_bytes": 1056, "local_bytes": 0, "max_threads": None,
           "code_bytes": 4992}  # fmt: skip
    library = elf.library("muse_jit_benchmark", bytes(9000))
    for number in range(count):
        family = ("row_norm", "dual_norm", "small_m_gemm", "all_reduce_dual_norm")[number % 4]
        key = entries.key(constants={**constants, "hidden": 8 * number}, kernel=family, toolchain=toolchain.parts,
                          source="ab" * 32, build=f"muse_jit.kernels.{family}:build")  # fmt: skip
        made = entries.entry(key, library, created=1.7e9 + number, resources=[gpu], created_by="muse_jit 0.1.0")
        publish(layout, made, library)
        lock = layout.lock(key.digest)
        layout.make_parents(lock)
        layout.write_new(lock, b'{"pid": 1, "host": "benchmark", "what": "compiling row_norm for sm_90a"}')
    return layout


def run(arguments: list[str]) -> tuple[float, float, float]:
    """Seconds, CPU seconds and MiB of one process and of those it started."""
    started = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *arguments], stdout=subprocess.DEVNULL, cwd=pathlib.Path(__file__).parent.parent
    )
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, arguments
    return seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def main() -> None:
    """Measure and print, or write, JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--entries", type=int, default=100_000)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--folder", help="Keep the caches here, and use them again.")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    os.fsync = lambda descriptor: None  # type: ignore[assignment]
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or temporary
        caches = {1000: f"{folder}/1000", arguments.entries: f"{folder}/{arguments.entries}"}
        for count, root in caches.items():
            if not os.path.isdir(root):
                fill(root, count)
        cases = {"python -c pass": ["-c", "pass"], "muse-cache --help": ["-c", ENTRY, "--help"]}
        for count, root in caches.items():
            for verb in ("ls", "stats"):
                cases[f"muse-cache {verb}, {count:,} entries"] = ["-c", ENTRY, verb, "--cache-dir", root]
        for case in cases.values():
            run(case)  # byte code and the system's caches are warm afterwards
        figures: dict[str, list[tuple[float, float, float]]] = {name: [] for name in cases}
        for turn in range(arguments.turns):
            for name, case in cases.items():
                if turn < 3 or str(f"{arguments.entries:,}") not in name:
                    figures[name].append(run(case))
    result = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpus": len(os.sched_getaffinity(0)),
        "versions": {name: version(name) for name in ("click", "nvidia-cutlass-dsl")},
        "loadavg": os.getloadavg(),
        "processes": {
            name: {
                "median_seconds": round(statistics.median(r[0] for r in runs), 3),
                "best_seconds": round(min(r[0] for r in runs), 3),
                "median_cpu_seconds": round(statistics.median(r[1] for r in runs), 3),
                "peak_mib": round(max(r[2] for r in runs), 1),
                "runs": [round(r[0], 3) for r in runs],
            }
            for name, runs in figures.items()
        },
    }
    text = json.dumps(result, indent=1)
    if arguments.json:
        pathlib.Path(arguments.json).write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
