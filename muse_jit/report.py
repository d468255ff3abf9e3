"""What a start or a warm-up did: for each kernel and in all, where it came from and what its time went into."""

import dataclasses
from collections import Counter
from typing import Any

from muse_jit.spans import STAGES, Span, Spans


@dataclasses.dataclass(frozen=True)
class KernelReport:
    """What became of one wanted kernel."""

    digest: str
    """Empty where the key could not be made."""
    kernel: str
    arch: str
    status: str
    """hit, compiled, failed, or planned (of a dry run: it would be compiled)."""
    reason: str | None = None
    """Why it was a miss at the first look-up; None for a hit."""
    detail: str = ""
    """The reason in words, where there is more to say."""
    compile_s: float | None = None
    """Seconds of its compile, where it was compiled here."""
    error: str | None = None
    """Why it failed, or why it could not be stored."""
    not_stored: bool = False
    spans: tuple[Span, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The fields of the JSON report's `kernels` list."""
        names = ("digest", "kernel", "arch", "status", "compile_s", "error", "reason")
        spans = Spans(list(self.spans))
        stages = {stage: round(spans.seconds(stage), 6) for stage in STAGES}
        return {**{name: getattr(self, name) for name in names}, "stages": stages}


@dataclasses.dataclass(frozen=True)
class Report:
    """The kernels in the order they were asked for, and the time it all took."""

    kernels: tuple[KernelReport, ...]
    seconds: float
    cache_dir: str
    unavailable: tuple[tuple[str, str], ...] = ()
    """Kernel families that the plan names without kernels, and why."""

    def count(self, status: str) -> int:
        """How many kernels have a status."""
        return sum(k.status == status for k in self.kernels)

    @property
    def hits(self) -> int:
        """Kernels that were in the cache, or that another process compiled meanwhile."""
        return self.count("hit")

    @property
    def compiled(self) -> int:
        """Kernels that this process compiled."""
        return self.count("compiled")

    @property
    def failed(self) -> int:
        """Kernels there are none of now."""
        return self.count("failed")

    @property
    def not_stored(self) -> int:
        """Kernels that were compiled and are not in the cache."""
        return sum(k.not_stored for k in self.kernels)

    @property
    def complete(self) -> bool:
        """Whether nothing failed and everything that was compiled is in the cache."""
        return not self.failed and not self.not_stored

    @property
    def misses(self) -> dict[str, int]:
        """Reason of a first look-up's miss to how many kernels."""
        return dict(Counter(k.reason for k in self.kernels if k.reason is not None))

    def stage_seconds(self, stage: str) -> float:
        """Time spent in one stage over all kernels; stages of different kernels overlap."""
        return sum(Spans(list(k.spans)).seconds(stage) for k in self.kernels)

    def summary(self) -> str:
        """One line for a log."""
        counts = [f"{self.hits} hits", f"{self.compiled} compiled"]
        if self.failed:
            counts.append(f"{self.failed} failed")
        if self.not_stored:
            counts.append(f"{self.not_stored} not stored")
        if self.misses:
            counts.append("misses: " + ", ".join(f"{n} {reason}" for reason, n in sorted(self.misses.items())))
        spent = [f"{stage} {s:.3f}" for stage in STAGES if (s := self.stage_seconds(stage)) >= 0.0005]
        stages = f" ({', '.join(spent)})" if spent else ""
        return f"{len(self.kernels)} kernels: {', '.join(counts)}; {self.seconds:.3f} s{stages}; cache {self.cache_dir}"

    def as_dict(self) -> dict[str, Any]:
        """The JSON report of `muse-jit warmup --json`."""
        return {
            "requested": len(self.kernels),
            "hits": self.hits,
            "compiled": self.compiled,
            "failed": self.failed,
            "not_stored": self.not_stored,
            "seconds": round(self.seconds, 3),
            "cache_dir": self.cache_dir,
            "kernels": [k.as_dict() for k in self.kernels],
            "misses": self.misses,
            "stages": {stage: round(self.stage_seconds(stage), 6) for stage in STAGES},
            "unavailable": [{"kernel": name, "reason": reason} for name, reason in self.unavailable],
        }
