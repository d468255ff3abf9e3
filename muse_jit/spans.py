"""What a request spent its time on: spans of named stages, by the one clock that all processes of a host share."""

import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import Iterator

STAGES = ("look-up", "wait", "import", "compile", "link", "publish", "load")
"""In the order of the path. "wait" is for another process or thread, "import" the compiler's, in its own process."""


@dataclasses.dataclass(frozen=True)
class Span:
    """One stage of one request, in one thread of one process."""

    stage: str
    start: float
    """Seconds of CLOCK_MONOTONIC (`time.monotonic()`), which processes of a host have in common."""
    seconds: float
    pid: int
    thread: int
    """Thread id of the operating system."""


@dataclasses.dataclass
class Spans:
    """The spans of one request, in the order they ended."""

    spans: list[Span] = dataclasses.field(default_factory=list)

    @contextlib.contextmanager
    def measure(self, stage: str) -> Iterator[None]:
        """Record the block as a span, however it ends."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.add(stage, start)

    def add(self, stage: str, start: float) -> None:
        """Record a span from `start` until now."""
        self.spans.append(Span(stage, start, time.monotonic() - start, os.getpid(), threading.get_native_id()))

    def seconds(self, stage: str) -> float:
        """Time spent in one stage, over all its spans."""
        return sum((span.seconds for span in self.spans if span.stage == stage), 0.0)
