"""Fill the cache where an image is built, prove that nothing is missing, and print how to serve from it.

    python examples/warmup_then_serve.py --tp 8 --arch sm_90a --cache-dir /opt/muse_jit

No GPU is needed. Exit code 1 when a kernel is missing afterwards. See warmup_then_serve.md for the image, the init
container and the serving command around it.
"""

import argparse
import dataclasses
import sys

from muse_jit import JitService, Settings
from muse_jit.errors import MuseJitError
from muse_jit.plan import MUSE_SPARK, Deployment, make_plan, read_model
from muse_jit.warmup import warm_up


def fill(deployment: Deployment, arch: str, settings: Settings) -> int:
    """Compile what is missing; returns how many kernels that were."""
    plan = make_plan(deployment, [arch])
    for family, reason in plan.unavailable:
        print(f"not planned: {family} ({reason})")
    report = warm_up(plan, settings)
    print(f"{len(plan.kernels)} kernels for {arch}: {report.count('hit')} found, {report.count('compiled')} compiled")
    for kernel in report.kernels:
        if kernel.error:
            print(f"{kernel.kernel} {kernel.digest[:12]}: {kernel.error}")
    return report.count("compiled")


def prove(deployment: Deployment, arch: str, settings: Settings) -> None:
    """Find and load everything as a serving process would, with compiling forbidden; raises where one is missing."""
    service = JitService(arch, dataclasses.replace(settings, mode="forbid"))
    for planned in make_plan(deployment, [arch]).kernels:
        service.get(planned.constants)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a config.json; default: the released Muse Spark")
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--arch", default="sm_90a")
    parser.add_argument("--cache-dir", help="default: that of this user")
    options = parser.parse_args()
    settings = Settings.from_environ().with_options(cache_dir=options.cache_dir)
    model = read_model(options.model) if options.model else MUSE_SPARK
    deployment = Deployment(model, tp=options.tp)
    try:
        fill(deployment, options.arch, settings)
        prove(deployment, options.arch, settings)
    except MuseJitError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    folder = f"MUSE_JIT_CACHE_DIR={options.cache_dir} " if options.cache_dir else ""
    name = options.model or "meta-models/Muse-Spark-Open-816B-A42B"
    print("everything is there with compiling forbidden; serve with:")
    print(f"{folder}MUSE_JIT_MODE=forbid vllm serve {name} --tensor-parallel-size {options.tp}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
