"""Fill the cache with a plan: look each kernel up, compile what is missing, several at a time, and report.

One failing kernel does not stop the others; each finished one is on disk at once, so a warm-up that is interrupted
and started again does only what is missing. Several warm-ups of one folder share the work.
"""

import time
from collections.abc import Callable

from muse_jit.errors import CacheUnusable, ToolchainError
from muse_jit.fill import fill
from muse_jit.plan import Plan
from muse_jit.report import Report
from muse_jit.service import JitService
from muse_jit.settings import Settings
from muse_jit.wanted import Wanted, explain_absence, look_up_all


def warm_up(
    plan: Plan,
    settings: Settings,
    *,
    jobs: int | None = None,
    force: bool = False,
    dry_run: bool = False,
    on_change: Callable[[Wanted], None] = lambda item: None,
) -> Report:
    """Have every kernel of a plan in the cache. `on_change` is called for each as it begins and ends.

    `jobs` is how many workers may run at a time on this host; default: MUSE_JIT_WORKERS, else what it bears.

    Raises:
        CacheUnusable: the cache folder cannot be made, written or trusted.
        LinkerMissing, ToolchainError: nothing can be compiled on this machine, and something would have to be.
        KeyboardInterrupt: after all workers were ended; what was finished is in the cache.
    """
    started = time.monotonic()
    settings = settings.with_options(workers=jobs)
    arches = list(dict.fromkeys(p.arch for p in plan.kernels)) or ["sm_90a"]
    first = JitService(arches[0], settings)
    services = {arches[0]: first, **{arch: first.for_arch(arch) for arch in arches[1:]}}
    if not dry_run and first.flight.stores:
        try:
            first.layout.create()
        except OSError as error:
            raise CacheUnusable(
                f"the cache folder {first.layout.root} cannot be made or written: {error.strerror}; "
                "name another with --cache-dir or MUSE_JIT_CACHE_DIR"
            ) from None
    wanted = [Wanted(services[p.arch], p.constants) for p in plan.kernels]
    missing = look_up_all(wanted, force=force, on_change=on_change)
    nowhere = next((i.error for i in wanted if isinstance(i.error, ToolchainError)), None)
    if nowhere is not None and not dry_run:
        raise nowhere
    if dry_run:
        explain_absence(first.layout, missing)
        for item in missing:
            on_change(item)
    elif missing:
        fill(missing, force=force, on_change=on_change)
    kernels = tuple(item.report() for item in wanted)
    return Report(kernels, time.monotonic() - started, first.layout.root, plan.unavailable)
