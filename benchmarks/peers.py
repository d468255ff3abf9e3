"""A warm start against the other caches for CuTe DSL kernels: the same 20 kernels, each from its own full cache.

    PYTHON benchmarks/peers.py [--repeat 7] [--json FILE]

PYTHON is of an environment of its own, with torch, nvidia-cutlass-dsl, apache-tvm-ffi, platformdirs, filelock, and
quack-kernels==0.6.5 flash-attn-4==4.0.0b36 flashinfer-python==0.7.2.post1 (installed with --no-deps) and what these
import: triton einops numpy torch-c-dlpack-ext click tqdm requests tabulate packaging ninja nvidia-ml-py.

No GPU: row norms for sm_90a, compiled by the same function for everybody, with torch imported before the clock starts.
Each number is of a new process; the contenders take turns, in another order each time. Reported apart: everything from
the first import to 20 callables, and loading alone, with every import done (ours with each digest verified). `plain`
compiles anew in each process. How often the compile function really ran is counted.
"""

import argparse
import importlib.metadata
import json
import os
import pathlib
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
ARCH, CUDA = "sm_90a", 13
WIDTHS = range(2048, 2048 + 20 * 256, 256)
compiles = 0


def compile_one(width):
    """The kernel of one width, compiled now: what every cache is to save."""
    global compiles
    compiles += 1
    from muse_jit import RowNormConstants
    from muse_jit.kernels.row_norm import build
    from muse_jit.key.target import Target

    constants = RowNormConstants(hidden=width, eps=1e-5, has_weight=True, gain_center=1.0)
    return build(constants, Target(ARCH, CUDA, "x86_64"))


def ours(folder):
    """muse_jit: imports, then a function that gets all kernels."""
    import tvm_ffi  # noqa: F401

    from muse_jit import JitService, RowNormConstants, Settings

    settings = Settings().with_options(cache_dir=folder, cuda=CUDA)

    def load():
        service = JitService(ARCH, settings)
        sets = [RowNormConstants(hidden=w, eps=1e-5, has_weight=True, gain_center=1.0) for w in WIDTHS]
        global compiles
        compiles += service.ensure(sets).compiled
        return [service.get(c) for c in sets]

    return load


def quack(folder):
    os.environ["QUACK_CACHE_DIR"] = folder
    from quack.cache import jit_cache

    cached = jit_cache(compile_one)
    return lambda: [cached(width) for width in WIDTHS]


def flash_attn_4(folder):
    os.environ.update(FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED="1", FLASH_ATTENTION_CUTE_DSL_CACHE_DIR=folder)
    from flash_attn.cute.cache_utils import get_jit_cache

    def load():
        cache = get_jit_cache("row_norm")
        for width in WIDTHS:
            if (width, ARCH) not in cache:
                cache[(width, ARCH)] = compile_one(width)
        return [cache[(width, ARCH)] for width in WIDTHS]

    return load


def flashinfer(folder):
    os.environ.update(FLASHINFER_WORKSPACE_BASE=folder, FLASHINFER_DISABLE_VERSION_CHECK="1")
    from flashinfer.jit.cute_dsl_core import build_and_load_cute_dsl_kernel

    return lambda: [
        build_and_load_cute_dsl_kernel("row_norm", f"w{width}", lambda width=width: compile_one(width))
        for width in WIDTHS
    ]


def plain(folder):
    import cutlass  # noqa: F401

    return lambda: [compile_one(width) for width in WIDTHS]


CONTENDERS = {"muse_jit": ours, "quack": quack, "flash-attn-4": flash_attn_4, "flashinfer": flashinfer, "plain": plain}


def one(name, folder):
    """One process: torch first, then the clock."""
    import torch  # noqa: F401

    began = time.perf_counter()
    load = CONTENDERS[name](folder)
    imported = time.perf_counter()
    kernels = load()
    done = time.perf_counter()
    assert len(kernels) == len(WIDTHS)
    assert all(callable(k) for k in kernels)
    times = {"all_ms": (done - began) * 1e3, "import_ms": (imported - began) * 1e3, "load_ms": (done - imported) * 1e3}
    print(json.dumps({**times, "compiles": compiles}), flush=True)
    os._exit(0)


def run(name, folder):
    """One start in a new process."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "CUTE_DSL_ARCH": ARCH}
    command = [sys.executable, __file__, "--one", name, "--folder", folder]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def main():
    """Fill each cache once, then measure in turns."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--json")
    parser.add_argument("--one", choices=CONTENDERS)
    parser.add_argument("--folder")
    arguments = parser.parse_args()
    if arguments.one:
        one(arguments.one, arguments.folder)
    samples = {name: [] for name in CONTENDERS}
    with tempfile.TemporaryDirectory() as root:
        folders = {name: f"{root}/{name}" for name in CONTENDERS}
        for name, folder in folders.items():
            os.mkdir(folder, 0o700)
            first = run(name, folder)
            assert first["compiles"] == len(WIDTHS), (name, first)
        for turn in range(arguments.repeat):
            names = list(CONTENDERS)
            random.Random(turn).shuffle(names)
            for name in names:
                sample = run(name, folders[name])
                assert sample["compiles"] == (len(WIDTHS) if name == "plain" else 0), (name, sample)
                samples[name].append(sample)
            print(f"turn {turn + 1} of {arguments.repeat}", file=sys.stderr)
    fields = ("all_ms", "import_ms", "load_ms")
    medians = {n: {f: statistics.median(s[f] for s in samples[n]) for f in fields} for n in CONTENDERS}
    us = medians["muse_jit"]
    distributions = (
        "torch",
        "nvidia-cutlass-dsl",
        "apache-tvm-ffi",
        "quack-kernels",
        "flash-attn-4",
        "flashinfer-python",
    )
    result = {
        "machine": {"cpus": len(os.sched_getaffinity(0)), "system": platform.machine()},
        "versions": {"python": platform.python_version(), **{d: importlib.metadata.version(d) for d in distributions}},
        "kernels": len(WIDTHS),
        "repeat": arguments.repeat,
        "medians": medians,
        "times_faster": {
            name: {"all": m["all_ms"] / us["all_ms"], "load": m["load_ms"] / us["load_ms"]}
            for name, m in medians.items()
            if name != "muse_jit"
        },
        "samples": samples,
    }
    text = json.dumps(result, indent=1)
    if arguments.json:
        pathlib.Path(arguments.json).write_text(text + "\n")
    print(json.dumps({k: v for k, v in result.items() if k != "samples"}, indent=1))


if __name__ == "__main__":
    main()
