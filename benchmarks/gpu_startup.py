"""A warm start on a GPU, from a cache that was filled on a machine without one, where importing the compiler fails.

    python benchmarks/gpu_startup.py --cache-dir FOLDER [--repeat 7] [--json FILE]

Fill FOLDER first, anywhere: python benchmarks/gpu_startup.py --fill --cache-dir FOLDER

Each repetition is a fresh process: imports, 20 kernels from the disk, their GPU modules loaded without a launch, then
all of them captured in one CUDA graph as their very first launches. Medians over the processes. What the guard says
during a capture is recorded, and that the capture goes on unharmed.
"""

import argparse
import json
import pathlib
import platform
import statistics
import subprocess
import sys
import time

ARCH = "sm_90a"


def kernel_sets():
    """Twenty row norms of different widths."""
    from muse_jit import RowNormConstants

    widths = range(2048, 2048 + 20 * 256, 256)
    return [RowNormConstants(hidden=width, eps=1e-5, has_weight=True, gain_center=1.0) for width in widths]


def service_for(folder, mode):
    from muse_jit import JitService, Settings

    return JitService(ARCH, Settings.from_environ().with_options(cache_dir=folder, mode=mode))


def one_start(folder):
    """One warm start in this process; its times in milliseconds, and what was checked."""
    sys.modules["cutlass"] = None
    clock = time.perf_counter
    times, marks = {}, [clock()]

    def mark(name):
        marks.append(clock())
        times[name] = (marks[-1] - marks[-2]) * 1e3

    import torch

    torch.cuda.init()
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    mark("torch_and_context")
    import tvm_ffi  # noqa: F401

    mark("import_tvm_ffi")
    from muse_jit.errors import CompileDuringCapture, MuseJitError

    sets = kernel_sets()
    mark("import_muse_jit")
    service = service_for(folder, "forbid")
    mark("service")
    report = service.ensure(sets)
    mark("ensure")
    times.update({f"ensure_{s}".replace("-", "_"): report.stage_seconds(s) * 1e3 for s in ("look-up", "load")})
    assert (report.hits, report.compiled) == (20, 0), report.summary()
    kernels = [service.get(c) for c in sets]
    for kernel in kernels:
        kernel.prepare(0)
    mark("prepare")

    operands = [(torch.randn(8, c.hidden, device="cuda").bfloat16(), torch.randn(c.hidden, device="cuda").bfloat16())
                for c in sets]  # fmt: skip
    outs = [torch.full_like(x, float("nan")) for x, _ in operands]
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    said = {}
    marks.append(clock())
    with torch.cuda.graph(graph, stream=stream):
        for kernel, (x, weight), out in zip(kernels, operands, outs, strict=True):
            kernel(x, weight, out)
        assert service.get(sets[0]) is kernels[0]  # a memory hit works
        unknown = kernel_sets()[0].__class__(hidden=1024, eps=1e-5, has_weight=True, gain_center=1.0)
        for name, ask in (("get", lambda: service.get(unknown)), ("prepare", lambda: kernels[0].prepare(0))):
            try:
                ask()
            except CompileDuringCapture as error:
                said[name] = str(error).replace(folder, "FOLDER")
    mark("capture")
    assert set(said) == {"get", "prepare"}
    graph.replay()
    torch.cuda.synchronize()
    captured = [out.clone() for out in outs]
    for kernel, (x, weight), out in zip(kernels, operands, outs, strict=True):
        out.fill_(float("nan"))
        kernel(x, weight, out)
    torch.cuda.synchronize()
    equal = sum(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(captured, outs, strict=True))
    assert not any(out.isnan().any() for out in outs)
    refused = ""
    try:
        kernels[0].prepare(99)
    except MuseJitError as error:
        refused = str(error)
    compiler = [m for m in sys.modules if m.startswith("cutlass") and sys.modules[m] is not None]
    return {"ms": times, "equal_after_capture": equal, "guard": said, "no_such_device": refused, "compiler": compiler}


def main():
    """Fill, or measure and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cache-dir", required=True)
    parser.add_argument("--fill", action="store_true")
    parser.add_argument("--one", action="store_true", help="one start in this process, as JSON")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    if arguments.fill:
        print(service_for(arguments.cache_dir, "auto").ensure(kernel_sets()).summary())
        return
    if arguments.one:
        print(json.dumps(one_start(arguments.cache_dir)))
        return
    command = [sys.executable, __file__, "--one", "--cache-dir", arguments.cache_dir]
    runs = [json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])
            for _ in range(arguments.repeat)]  # fmt: skip
    import torch

    result = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processes": len(runs),
        "median_ms": {name: statistics.median(r["ms"][name] for r in runs) for name in runs[0]["ms"]},
        "kernels_equal_after_capture": [r["equal_after_capture"] for r in runs],
        "compiler_modules": sorted({m for r in runs for m in r["compiler"]}),
        "guard": runs[0]["guard"],
        "no_such_device": runs[0]["no_such_device"],
        "runs": [r["ms"] for r in runs],
    }
    text = json.dumps(result, indent=1)
    if arguments.json:
        pathlib.Path(arguments.json).write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
