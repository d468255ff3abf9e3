"""The `muse-jit` command: warmup, plan, env."""

import sys
from collections.abc import Callable
from typing import Any

import click

from muse_jit import __version__
from muse_jit.console import FAILED, OK, cache_dir_option, json_option, print_json, run, size_text
from muse_jit.constants.all_reduce_dual_norm import SUM_ORDERS
from muse_jit.errors import TargetError, ToolchainError, UsageError
from muse_jit.key.target import check_arch, device_arch, host_arch
from muse_jit.plan import MUSE_SPARK, ORDERS, ROWS, Deployment, Plan, make_plan, read_model, read_plan
from muse_jit.settings import Settings


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="muse-jit")
def main() -> None:
    """Compile the CuTe DSL kernels of a deployment ahead of time, into a cache that serving processes share.

    Exit codes: 0 fine, 1 something failed, 2 wrong usage, 3 the cache cannot be used for what was asked.
    """


def selection_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options that select kernels, the same for `warmup` and `plan`."""
    options = (
        click.option(
            "--model", default="muse-spark", show_default=True, help="muse-spark, or the PATH of a config.json."
        ),
        click.option("--tp", type=int, help="Tensor parallel size: 1, 2, 4, 8 or 16.  [default: 8]"),
        click.option("--arch", help="GPU architectures, such as sm_90a,sm_100a. Default: that of the device."),
        click.option("--rows", help=f"Row counts to plan GEMMs for.  [default: {','.join(map(str, ROWS))}]"),
        click.option(
            "--plan",
            "plan_file",
            metavar="FILE",
            help="Kernels from a FILE of `muse-jit plan`, or its text.",
        ),
        click.option("--only", help="Only the kernels of one FAMILY."),
        click.option(
            "--cuda", type=click.Choice(["12", "13"]), help="CUDA major version. Default: the newest installed."
        ),
        click.option("--order", type=click.Choice(ORDERS), help="Whose order of operations.  [default: triton-3.8]"),
        click.option("--sum-order", type=click.Choice(SUM_ORDERS), help="Order of the all-reduce.  [default: mnnvl]"),
        click.option("--no-pdl", is_flag=True, help="Plan kernels without programmatic dependent launch."),
    )
    for option in reversed(options):
        function = option(function)
    return function


@main.command()
@selection_options
@click.option("--jobs", type=click.IntRange(min=1), help="Compiles at a time. Default: the usable CPUs.")
@click.option("--force", is_flag=True, help="Compile also what is in the cache.")
@click.option("--dry-run", is_flag=True, help="Say what would be compiled, and why each is missing; change nothing.")
@click.option("--trace", metavar="FILE", help="Write where the time went, for Perfetto or chrome://tracing.")
@cache_dir_option
@json_option
def warmup(
    jobs: int | None,
    force: bool,
    dry_run: bool,
    trace: str | None,
    cache_dir: str | None,
    as_json: bool,
    cuda: str | None,
    **selection: Any,
) -> int:
    """Fill the cache with the kernels of a deployment, on any machine, GPU or not."""
    from muse_jit.progress import show_report, watch
    from muse_jit.trace import check_writable, write_trace
    from muse_jit.warmup import warm_up

    if trace is not None:
        check_writable(trace)
    settings = _settings(cache_dir, cuda)
    plan = _plan(**selection)
    with watch(len(plan.kernels), quiet=as_json) as on_change:
        report = warm_up(plan, settings, jobs=jobs, force=force, dry_run=dry_run, on_change=on_change)
    if trace is not None:
        write_trace(report, trace)
    if as_json:
        print_json(report.as_dict())
    else:
        show_report(report)
    return OK if report.complete else FAILED


@main.command()
@selection_options
@cache_dir_option
@json_option
def plan(cache_dir: str | None, as_json: bool, cuda: str | None, **selection: Any) -> int:
    """Print the kernels of a deployment as one JSON document (with or without --json)."""
    print_json(_plan(**selection).as_dict())
    return OK


@main.command()
@click.option("--arch", help="GPU architecture. Default: that of the device.")
@click.option("--cuda", type=click.Choice(["12", "13"]), help="CUDA major version. Default: the newest installed.")
@cache_dir_option
@json_option
def env(arch: str | None, cuda: str | None, cache_dir: str | None, as_json: bool) -> int:
    """Show target, toolchain, cache folder and settings, and where each came from."""
    document = _environment(_settings(cache_dir, cuda), arch)
    if as_json:
        print_json(document)
        return OK
    target, toolchain, cache = document["target"], document["toolchain"], document["cache"]
    print(f"architecture  {target['arch'] or '-'}  ({target['origin']})")
    print(f"host          {target['host']}")
    print(f"cuda          {target['cuda'] or '-'}")
    print(f"toolchain     {(toolchain['digest'] or '-')[:12]}  ({toolchain['origin']})")
    for name, part in (toolchain["parts"] or {}).items():
        print(f"  {name:32} {part['version'] if isinstance(part, dict) else part}")
    print(
        f"cache         {cache['root']}  ({cache['origin']}; {cache['entries']} entries, {size_text(cache['bytes'])})"
    )
    for name, setting in document["settings"].items():
        print(f"{name:16}  {setting['value']!s:24} {setting['origin']}; {setting['variable']}")
    return OK


def _settings(cache_dir: str | None, cuda: str | None) -> Settings:
    return Settings.from_environ().with_options(cache_dir=cache_dir, cuda=int(cuda) if cuda else None)


def _plan(
    model: str,
    tp: int | None,
    arch: str | None,
    rows: str | None,
    plan_file: str | None,
    only: str | None,
    order: str | None,
    sum_order: str | None,
    no_pdl: bool,
) -> Plan:
    arches = _arches(arch)
    if plan_file is not None:
        if model != MUSE_SPARK.name or tp is not None or rows or order or sum_order or no_pdl:
            raise UsageError("--plan takes the kernels from a file; of the selection only --arch and --only go with it")
        result = read_plan(plan_file, arches)
    else:
        defaults = Deployment()
        deployment = Deployment(
            MUSE_SPARK if model == MUSE_SPARK.name else read_model(model),
            defaults.tp if tp is None else tp,
            defaults.rows if rows is None else _rows(rows),
            order or defaults.order,
            sum_order or defaults.sum_order,
            not no_pdl,
        )
        result = make_plan(deployment, arches or [device_arch()])
    return result.only(only) if only else result


def _arches(text: str | None) -> list[str]:
    if text is None:
        return []
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        check_arch(text)
    return [check_arch(name) for name in names]


def _rows(text: str) -> tuple[int, ...]:
    try:
        return tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        raise UsageError(f"--rows {text!r}; it must be numbers separated by commas, such as 1,2,8") from None


def _environment(settings: Settings, arch: str | None) -> dict[str, Any]:
    from muse_jit.key.toolchain import identify
    from muse_jit.store.layout import Layout, default_root
    from muse_jit.store.listing import listed
    from muse_jit.store.publish import recorded_toolchains

    root, root_origin = default_root(settings.cache_dir, settings.vllm_cache_root)
    layout = Layout(root, settings.share)
    toolchain: dict[str, Any] = {"digest": None, "parts": None}
    cuda = settings.cuda
    try:
        found = identify(cuda, host_arch(), check=settings.toolchain_check, recorded=recorded_toolchains(layout))
        toolchain = {"digest": found.digest, "origin": found.origin, "parts": found.parts}
        toolchain["modified"] = list(found.modified)
        cuda = found.cuda
    except ToolchainError as error:
        toolchain["origin"] = str(error)
    origin = "option"
    try:
        arch, origin = (check_arch(arch), origin) if arch else (device_arch(), "device")
    except TargetError as error:
        if arch:
            raise
        origin = str(error)
    entries = list(listed(layout))
    return {
        "version": __version__,
        "python": sys.version.split()[0],
        "target": {"arch": arch, "cuda": cuda, "host": host_arch(), "origin": origin},
        "toolchain": toolchain,
        "cache": {
            "root": root,
            "origin": root_origin,
            "entries": len(entries),
            "bytes": sum(e.size for e in entries),
        },
        "settings": settings.describe(),
    }


def entry() -> None:
    """The console script."""
    run(main, "muse-jit")


if __name__ == "__main__":
    entry()
