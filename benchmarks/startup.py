"""Cold and warm starts: 1 to 8 processes that want the same 20 kernels, against compiling in the serving process.

    python benchmarks/startup.py [--repeat 5] [--json FILE]

No GPU: the kernels are 20 row norms for sm_90a. Every number is of processes started for it, which stand at a barrier
with their imports done (torch is not imported; a serving process has it anyway). Medians; the cases take turns.

cold      an empty cache: seconds from the barrier until the last process has all 20 kernels loaded, and how that
          compares with the ideal: all compile and link seconds of that run over the usable cores, and one import
warm      a full cache: the same; and for one process the milliseconds from after `import tvm_ffi`
inside    the alternative: each process imports the compiler and compiles for itself (`cute.compile`)
memory    resident MiB of a process that has its kernels, and of what its start ran beside it
hit       nanoseconds of `service.get` for a kernel in memory
"""

import argparse
import json
import os
import pathlib
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import timeit

ROOT = pathlib.Path(__file__).resolve().parent.parent
ARCH = "sm_90a"
WIDTHS = range(2048, 2048 + 20 * 256, 256)


def kernel_sets():
    from muse_jit import RowNormConstants

    return [RowNormConstants(hidden=width, eps=1e-5, has_weight=True, gain_center=1.0) for width in WIDTHS]


def resident_mib(pid="self"):
    lines = pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) / 1024


def stand_at(barrier):
    """Wait until the barrier file is there; returns when this process saw it, by the monotonic clock."""
    pathlib.Path(f"{barrier}.{os.getpid()}").touch()
    while not os.path.exists(barrier):
        time.sleep(0.001)
    return time.monotonic()


def rank_ours(barrier, cache):
    """One process that gets its kernels from the cache; nothing is compiled in it."""
    import tvm_ffi  # noqa: F401

    before = time.perf_counter()
    from muse_jit import JitService, Settings

    sets = kernel_sets()
    set_up = time.perf_counter() - before
    opened = stand_at(barrier)
    began = time.perf_counter()
    service = JitService(ARCH, Settings().with_options(cache_dir=cache))
    report = service.ensure(sets)
    seconds = time.perf_counter() - began
    kernel = service.get(sets[0])
    assert all(service.in_memory(c) for c in sets)
    spans = [s for k in report.kernels for s in k.spans]
    hit = min(timeit.repeat(lambda: service.get(sets[3]), number=20000, repeat=5)) / 20000
    return {
        "opened": opened,
        "done": opened + seconds,
        "from_import_ms": (set_up + seconds) * 1e3,
        "compiled": report.compiled,
        "hits": report.hits,
        "stages": {s: report.stage_seconds(s) for s in ("look-up", "wait", "import", "compile", "link", "load")},
        "workers": len({s.pid for s in spans if s.stage == "compile"}),
        "resident_mib": resident_mib(),
        "hit_ns": hit * 1e9,
        "compiler_modules": [m for m in sys.modules if m.startswith("cutlass")],
        "kernel": repr(kernel),
    }


def rank_inside(barrier, cache):
    """One process that does what serving processes do today: import the compiler, compile each kernel."""
    import tvm_ffi  # noqa: F401

    sys.modules["torch"] = None  # the DSL imports it where it finds it; neither side of the comparison has it
    sets = kernel_sets()
    opened = stand_at(barrier)
    began = time.perf_counter()
    import cutlass  # noqa: F401

    imported = time.perf_counter() - began
    from muse_jit.kernels.row_norm import build
    from muse_jit.key.target import Target

    kept = [build(c, Target(ARCH, 13, "x86_64")) for c in sets]
    seconds = time.perf_counter() - began
    return {
        "opened": opened,
        "done": opened + seconds,
        "from_import_ms": seconds * 1e3,
        "import": imported,
        "kernels": len(kept),
        "resident_mib": resident_mib(),
    }


RANKS = {"ours": rank_ours, "inside": rank_inside}


def together(kind, count, cache, folder):
    """Run `count` processes of one kind behind a barrier; wall seconds, and what each said."""
    barrier = f"{folder}/barrier-{time.monotonic_ns()}"
    command = [sys.executable, __file__, "--rank", kind, "--barrier", barrier, "--cache-dir", cache]
    # torch is kept out: whoever imports tvm_ffi first imports torch where it is installed.
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(count)]
    deadline = time.monotonic() + 120
    while len(list(pathlib.Path(folder).glob(f"{os.path.basename(barrier)}.*"))) < count:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(0.3)
    pathlib.Path(barrier).touch()
    said = []
    for process in processes:
        out, _ = process.communicate(timeout=600)
        assert process.returncode == 0
        said.append(json.loads(out.splitlines()[-1]))
    wall = max(s["done"] for s in said) - min(s["opened"] for s in said)
    return wall, said


def cold(count, folder, cores):
    """One cold start of `count` processes."""
    cache = tempfile.mkdtemp(dir=folder)
    wall, said = together("ours", count, cache, folder)
    assert sum(s["compiled"] for s in said) == len(WIDTHS)
    assert all(s["compiler_modules"] == [] for s in said)
    work = sum(s["stages"]["compile"] + s["stages"]["link"] for s in said)
    imports = [s["stages"]["import"] for s in said if s["stages"]["import"]]
    ideal = work / cores + max(imports)
    return cache, {
        "wall_s": wall,
        "compiles": sum(s["compiled"] for s in said),
        "compile_and_link_s": work,
        "imports": len(imports),
        "import_s": max(imports),
        "ideal_s": ideal,
        "over_ideal": wall / ideal,
        "resident_mib": statistics.median(s["resident_mib"] for s in said),
    }


def warm(count, folder, cache):
    """One warm start of `count` processes."""
    wall, said = together("ours", count, cache, folder)
    assert [s["hits"] for s in said] == [len(WIDTHS)] * count
    return {
        "wall_s": wall,
        "from_import_ms": statistics.median(s["from_import_ms"] for s in said),
        "resident_mib": statistics.median(s["resident_mib"] for s in said),
        "hit_ns": statistics.median(s["hit_ns"] for s in said),
        "look_up_ms": statistics.median(s["stages"]["look-up"] for s in said) * 1e3,
        "load_ms": statistics.median(s["stages"]["load"] for s in said) * 1e3,
    }


def inside(count, folder):
    """One start of `count` processes that compile for themselves."""
    wall, said = together("inside", count, folder, folder)
    return {
        "wall_s": wall,
        "from_import_ms": statistics.median(s["from_import_ms"] for s in said),
        "import_s": statistics.median(s["import"] for s in said),
        "resident_mib": statistics.median(s["resident_mib"] for s in said),
    }


def medians(samples):
    """Name to median over the samples, and the range of the first name."""
    result = {name: statistics.median(s[name] for s in samples) for name in samples[0]}
    result["wall_s_all"] = sorted(s["wall_s"] for s in samples)
    return result


def measure(repeat):
    """All cases, taking turns."""
    from muse_jit.compiler.limits import usable_cpus, worker_limit

    cores = usable_cpus()
    samples = {}
    with tempfile.TemporaryDirectory() as folder:
        full = ""
        for turn in range(repeat):
            for count in (1, 2, 4, 8):
                cache, values = cold(count, folder, cores)
                samples.setdefault(f"cold {count}", []).append(values)
                if full:
                    shutil.rmtree(cache)
                full = full or cache
            for count in (1, 8):
                samples.setdefault(f"warm {count}", []).append(warm(count, folder, full))
            for count in (1, 8) if turn == 0 else (1,):  # eight compilers on few cores take a minute
                samples.setdefault(f"inside {count}", []).append(inside(count, folder))
            print(f"turn {turn + 1} of {repeat}", file=sys.stderr)
    cases = {name: medians(values) for name, values in samples.items()}
    import importlib.metadata as metadata

    names = ("nvidia-cutlass-dsl", "apache-tvm-ffi", "filelock")
    return {
        "machine": {"cpus": cores, "workers": worker_limit(), "system": platform.machine()},
        "versions": {"python": platform.python_version(), **{n: metadata.version(n) for n in names}},
        "kernels": len(WIDTHS),
        "repeat": repeat,
        "cases": cases,
        "ratios": {
            "warm 1 / inside 1": cases["warm 1"]["from_import_ms"] / cases["inside 1"]["from_import_ms"],
            "cold 8 / inside 8": cases["cold 8"]["wall_s"] / cases["inside 8"]["wall_s"],
            "cold 8 / cold 1": cases["cold 8"]["wall_s"] / cases["cold 1"]["wall_s"],
            "memory warm / inside": cases["warm 1"]["resident_mib"] / cases["inside 1"]["resident_mib"],
        },
    }


def main():
    """Measure and write JSON; or be one of the processes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json")
    parser.add_argument("--rank", choices=sorted(RANKS))
    parser.add_argument("--barrier")
    parser.add_argument("--cache-dir")
    arguments = parser.parse_args()
    if arguments.rank:
        sys.modules["torch"] = None
        print(json.dumps(RANKS[arguments.rank](arguments.barrier, arguments.cache_dir)))
        sys.stdout.flush()
        os._exit(0)
    text = json.dumps(measure(arguments.repeat), indent=1)
    if arguments.json:
        pathlib.Path(arguments.json).write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
