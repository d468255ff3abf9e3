"""Have a list of kernels in the cache, sharing the compiling with every process that does the same.

Each process takes what its look-up did not find and nobody else is compiling: the lock of a key is taken without
waiting, under one of the places for workers that all processes of a host share. So N ranks that start at once split
the work, no more workers run than the host bears, and only a rank that got a place starts a compiler: as a rule one,
which takes all places. The others watch the cache and take what they find published. A rank that dies frees its locks
and its places, and the next one goes on. Nothing is decided beforehand, so nobody waits for a rank that is late.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Sequence

from muse_jit.compiler.forkserver import end_servers
from muse_jit.errors import LinkerMissing, MuseJitError, SourceChanged
from muse_jit.settings import SLOT_SECONDS
from muse_jit.wanted import Wanted

POLL_SECONDS = 0.05
"""How often the cache is asked for what others publish."""

GRACE_SECONDS = 0.3
"""How long who has the first place is left to take the others, too, so that one process of a host starts a compiler
for all of them. Without it each of two places went to another of eight ranks, and each imported the compiler."""

RETRY_SECONDS = 0.1
"""How long after everything was found in others' hands it is tried again: a holder may have died or failed."""


def fill(
    missing: Sequence[Wanted],
    *,
    force: bool = False,
    on_change: Callable[[Wanted], None] = lambda item: None,
) -> None:
    """Settle what a look-up left: stored, or failed with its error. `on_change` is called when one begins or ends.

    Raises:
        LinkerMissing: nothing can be compiled on this machine.
        KeyboardInterrupt: after all workers were ended; what was finished is in the cache.
    """
    crew = _Crew(list(missing), force, on_change)
    try:
        crew.run()
    except BaseException:
        crew.stopped = True
        end_servers()
        raise


class _Crew:
    """The threads of one `fill`: each has a worker's place and compiles what it can claim, one after another."""

    def __init__(self, missing: list[Wanted], force: bool, on_change: Callable[[Wanted], None]) -> None:
        self.open = missing
        """What nobody here has in hand; guarded by `state`, like everything below."""
        self.force, self.on_change = force, on_change
        self.jobs = missing[0].service.flight.limit
        self.state = threading.Condition()
        self.threads = 0
        self.retry_at = 0.0
        self.grace_ends = time.monotonic() + GRACE_SECONDS
        self.progress = time.monotonic()
        self.stopped = False
        self.fatal: BaseException | None = None

    def run(self) -> None:
        """Until nothing is open and no thread works."""
        while True:
            self._take_published()
            with self.state:
                if self.fatal is not None:
                    raise self.fatal
                if not self.open and not self.threads:
                    return
                may_start = self.open and self.threads < self.jobs and time.monotonic() >= self.retry_at
            if not (may_start and self._start_thread()):
                with self.state:
                    self.state.wait(POLL_SECONDS)

    def _take_published(self) -> None:
        """What others have published meanwhile."""
        if self.force:
            return
        with self.state:
            found = [item for item in self.open if item.published()]
            self.open = [item for item in self.open if item not in found]
        for item in found:
            item.take_published()
            self._return(item)

    def _start_thread(self) -> bool:
        """Start a thread, if there is a place for a worker; whether one was started."""
        with self.state:
            if not self.open:
                return False
            flight = self.open[0].service.flight
            # No place was given back and nothing published for long: a holder has stopped, and must not stop everybody.
            stuck = time.monotonic() - self.progress > SLOT_SECONDS
        place = contextlib.ExitStack()
        only_first = not self.threads and time.monotonic() < self.grace_ends
        if not place.enter_context(flight.place(0.0, only_first=only_first)) and not stuck:
            place.close()
            return False
        with self.state:
            self.threads += 1
            self.progress = time.monotonic()
        try:
            threading.Thread(target=self._work, args=(place,), daemon=True, name="muse_jit-fill").start()
        except RuntimeError:  # no more threads in this process: those there are go on
            place.close()
            with self.state:
                self.threads -= 1
                self.retry_at = time.monotonic() + RETRY_SECONDS
                if not self.threads:
                    raise
            return False
        return True

    def _work(self, place: contextlib.ExitStack) -> None:
        """Compile what can be claimed, until everything open is in others' hands."""
        try:
            with place:
                tried: list[Wanted] = []
                while (item := self._take(tried)) is not None:
                    tried = [] if self._compile(item) else [*tried, item]
        except BaseException as error:  # a bug: it must end the fill, not only this thread
            with self.state:
                self.fatal = error
        finally:
            with self.state:
                self.threads -= 1
                self.retry_at = time.monotonic() + RETRY_SECONDS
                self.state.notify_all()

    def _take(self, tried: list[Wanted]) -> Wanted | None:
        with self.state:
            item = next((i for i in self.open if i not in tried), None)
            if item is not None and not self.stopped:
                self.open.remove(item)
                return item
            return None

    def _compile(self, item: Wanted) -> bool:
        """Claim and compile one item; whether that settled it."""
        item.under_way = True
        self.on_change(item)
        try:
            item.claim(self.force)
        except SourceChanged as error:
            item.edits += 1
            item.service.forget_sources()
            if item.edits > 1:  # edited all the time, or another source here than there: asking again is no end
                item.error = error
            else:
                item.look(self.force)
        except LinkerMissing as error:
            with self.state:
                self.fatal = error
            item.error = error
        except MuseJitError as error:
            item.error = error
        finally:
            item.under_way = False
            self._return(item)
        return item.settled

    def _return(self, item: Wanted) -> None:
        """Out of hand: settled, or open again."""
        if item.settled:
            self.on_change(item)
        with self.state:
            if item.settled:
                self.progress = time.monotonic()
            else:
                self.open.append(item)
            self.state.notify_all()
