"""Fill the cache with a plan: look each kernel up, compile what is missing, several at a time, and report.

One failing kernel does not stop the others; each finished one is on disk at once, so a warm-up that is interrupted
and started again does only what is missing.
"""

import dataclasses
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

from muse_jit.compiler.limits import worker_limit
from muse_jit.errors import CacheUnusable, LinkerMissing, MuseJitError
from muse_jit.plan import Plan, Planned
from muse_jit.service import JitService
from muse_jit.settings import Settings
from muse_jit.store.lookup import Hit


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of one planned kernel; `status` is hit, compiled, failed or planned."""

    digest: str
    kernel: str
    arch: str
    status: str
    compile_s: float | None = None
    error: str | None = None
    not_stored: bool = False

    def as_dict(self) -> dict[str, Any]:
        """The fields of the report's `kernels` list."""
        values = dataclasses.asdict(self)
        del values["not_stored"]
        return values


@dataclasses.dataclass(frozen=True)
class WarmupReport:
    """Outcomes in the order of the plan, and the time it all took."""

    outcomes: tuple[Outcome, ...]
    seconds: float
    cache_dir: str
    unavailable: tuple[tuple[str, str], ...] = ()

    def count(self, status: str) -> int:
        """How many kernels have a status."""
        return sum(o.status == status for o in self.outcomes)

    @property
    def not_stored(self) -> int:
        """Kernels that were compiled and are not in the cache."""
        return sum(o.not_stored for o in self.outcomes)

    @property
    def complete(self) -> bool:
        """Whether nothing failed and everything that was compiled is in the cache."""
        return not self.count("failed") and not self.not_stored

    def as_dict(self) -> dict[str, Any]:
        """The JSON report of `muse-jit warmup --json`."""
        return {
            "requested": len(self.outcomes),
            "hits": self.count("hit"),
            "compiled": self.count("compiled"),
            "failed": self.count("failed"),
            "not_stored": self.not_stored,
            "seconds": round(self.seconds, 3),
            "cache_dir": self.cache_dir,
            "kernels": [o.as_dict() for o in self.outcomes],
            "unavailable": [{"kernel": name, "reason": reason} for name, reason in self.unavailable],
        }


def warm_up(
    plan: Plan,
    settings: Settings,
    *,
    jobs: int | None = None,
    force: bool = False,
    dry_run: bool = False,
    on_outcome: Callable[[Outcome], None] | None = None,
) -> WarmupReport:
    """Have every kernel of a plan in the cache. `on_outcome` is called for each as it finishes.

    Raises:
        CacheUnusable: the cache folder cannot be made, written or trusted.
        LinkerMissing, ToolchainError: nothing can be compiled on this machine, and something would have to be.
    """
    started = time.perf_counter()
    services = {p.arch: JitService(p.arch, settings) for p in plan.kernels}
    layout = next(iter(services.values())).layout if services else JitService("sm_90a", settings).layout
    if not dry_run:
        try:
            layout.create()
        except OSError as error:
            raise CacheUnusable(
                f"the cache folder {layout.root} cannot be made or written: {error.strerror}; "
                "name another with --cache-dir or MUSE_JIT_CACHE_DIR"
            ) from None
    outcomes: dict[int, Outcome] = {}
    pool = ThreadPoolExecutor(jobs or settings.workers or worker_limit())
    pending: dict[Future[Outcome], int] = {
        pool.submit(_one, services[p.arch], p, force, dry_run): index for index, p in enumerate(plan.kernels)
    }
    try:
        while pending:
            for future in wait(pending, return_when=FIRST_COMPLETED).done:
                index = pending.pop(future)
                outcomes[index] = future.result()
                if on_outcome is not None:
                    on_outcome(outcomes[index])
    finally:
        # After an interruption, not waiting: the caller ends the process, and the workers end with it.
        pool.shutdown(wait=False, cancel_futures=True)
    ordered = tuple(outcomes[index] for index in sorted(outcomes))
    return WarmupReport(ordered, time.perf_counter() - started, layout.root, plan.unavailable)


def _one(service: JitService, planned: Planned, force: bool, dry_run: bool) -> Outcome:
    constants = planned.constants
    digest = ""
    try:
        digest = service.key_of(constants)[1].digest
        if dry_run:
            status = "hit" if isinstance(service.find(constants), Hit) and not force else "planned"
            return Outcome(digest, constants.family, planned.arch, status)
        stored = service.obtain(constants, force=force)
    except LinkerMissing:
        raise
    except MuseJitError as error:
        return Outcome(digest, constants.family, planned.arch, "failed", error=str(error))
    seconds = stored.hit.entry.compile_seconds if stored.status == "compiled" else None
    return Outcome(
        digest,
        constants.family,
        planned.arch,
        stored.status,
        seconds,
        stored.not_stored or None,
        bool(stored.not_stored),
    )
