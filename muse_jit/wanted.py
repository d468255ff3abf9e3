"""One kernel that is wanted from a service, from its look-up to its report."""

import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from muse_jit.constants.base import ConstantSet
from muse_jit.errors import MuseJitError
from muse_jit.report import KernelReport
from muse_jit.request import Request, Stored
from muse_jit.spans import Spans
from muse_jit.store.layout import Layout
from muse_jit.store.lookup import Hit, Miss, Reason

if TYPE_CHECKING:
    from muse_jit.service import JitService


class Wanted:
    """Settled when it is stored or has failed; `stored` and `error` say which."""

    def __init__(self, service: "JitService", constants: ConstantSet) -> None:
        self.service, self.constants = service, constants
        self.spans = Spans()
        self.stored: Stored | None = None
        self.error: Exception | None = None
        self.first_miss: Miss | None = None
        self.busy_since: float | None = None
        """When it was first found in somebody else's hands."""
        self.under_way = False
        """Whether this process compiles it now."""
        self.edits = 0
        """How often its source was edited while it was compiled."""
        self._since = time.monotonic()
        self._request: Request | None = None
        self._miss: Miss | None = None
        self._to_verify: Hit | None = None

    @property
    def settled(self) -> bool:
        """Whether nothing is left to do for it."""
        return self.stored is not None or self.error is not None

    @property
    def digest(self) -> str:
        """Digest of its key; empty where the key could not be made."""
        return self._request.key.digest if self._request is not None else ""

    @property
    def document(self) -> dict[str, Any]:
        """The key document. Only of one that was looked up."""
        assert self._request is not None
        return self._request.key.document

    def look(self, force: bool = False) -> None:
        """Make the key and look it up. What cannot be compiled when it is missing has failed."""
        service = self.service
        self._to_verify = self._miss = None
        try:
            with self.spans.measure("look-up"):
                self._request = service.request_for(self.constants, self._since, self.spans)
                found = service.look_up(self._request.key, force=force)
            if isinstance(found, Hit):
                self._hit(found)
                return
            self._miss = found
            self.first_miss = self.first_miss or found
            service.policy.may_compile(self._request, found)
        except MuseJitError as error:
            self.error = error

    def published(self) -> bool:
        """Whether an entry lies there now, other than the damaged one that was found: one `lstat`, again and again."""
        if self._to_verify is not None or self._request is None:
            return False
        try:
            inode = os.lstat(self.service.layout.entry(self._request.key.digest)).st_ino
        except OSError:
            return False
        return self._miss is None or inode != self._miss.inode

    def take_published(self) -> None:
        """Look at what somebody else published."""
        assert self._request is not None
        found = self.service.look_up(self._request.key)
        if isinstance(found, Hit):
            self._waited()
            self._hit(found)
        else:
            self._miss = found

    def claim(self, force: bool) -> bool:
        """Compile it in a worker's place that the caller has, unless somebody else is at it; whether it is settled.

        Raises: as `SingleFlight.claim`.
        """
        assert self._request is not None
        flight = self.service.flight
        if self._to_verify is not None:
            flight.compare(self._request, self._to_verify, has_place=True)
            self.service.verified.add(self.digest)
            self._hit(self._to_verify)
            return True
        assert self._miss is not None
        self.stored = flight.claim(self._request, self._miss, self._look_again, force=force)
        if self.stored is None:
            now = time.monotonic()
            self.busy_since = self.busy_since or now
            waited = now - self.busy_since
            if waited > self.service.settings.patience:  # its holder has stopped: one of those who wait takes over
                self.stored = flight.build(
                    self._request, self._miss, self._look_again, force=force, waited=waited, has_place=True
                )
        if self.stored is not None and self.stored.status == "hit":
            self._waited()
        return self.stored is not None

    def report(self) -> KernelReport:
        """What became of it; not settled means that it would be compiled."""
        stored, miss = self.stored, self.first_miss
        status = "failed" if self.error is not None else "planned" if stored is None else stored.status
        reason = miss if miss is not None and status != "hit" else None
        error = str(self.error) if self.error is not None else (stored.not_stored or None) if stored else None
        return KernelReport(
            digest=self.digest,
            kernel=self.constants.family,
            arch=self.service.target.arch,
            status=status,
            reason=str(reason.reason) if reason is not None else None,
            detail=reason.detail if reason is not None else "",
            compile_s=stored.hit.entry.compile_seconds if stored is not None and status == "compiled" else None,
            error=error,
            not_stored=bool(stored is not None and stored.not_stored),
            spans=tuple(self.spans.spans),
        )

    def _waited(self) -> None:
        """Somebody else compiled it between the look-up and now."""
        self.service.counters.waited += 1
        self.spans.add("wait", self._since if self.busy_since is None else self.busy_since)

    def _look_again(self) -> Hit | Miss:
        assert self._request is not None
        return self.service.look_up(self._request.key)

    def _hit(self, hit: Hit) -> None:
        if self.service.settings.mode == "verify" and self.digest not in self.service.verified:
            self._to_verify = hit
        else:
            self.stored = Stored(hit, "hit")


def look_up_all(
    wanted: Sequence[Wanted], *, force: bool = False, on_change: Callable[[Wanted], None] = lambda item: None
) -> list[Wanted]:
    """Look everything up; what is left to be compiled. `on_change` is called for each that is settled by it."""
    missing = []
    for item in wanted:
        item.look(force)
        if item.settled:
            on_change(item)
        else:
            missing.append(item)
    return missing


def explain_absence(layout: Layout, missing: Sequence[Wanted]) -> None:
    """For each kernel that is simply not there, say which parts of the key the nearest entry has otherwise."""
    from muse_jit.store.nearest import causes, nearest_each

    absent = [item for item in missing if item.first_miss is not None and item.first_miss.reason == Reason.ABSENT]
    for item, found in zip(absent, nearest_each(layout, [item.document for item in absent]), strict=True):
        if found is not None:
            entry, parts = found
            item.first_miss = Miss(
                Reason.ABSENT, f"the nearest, {entry.digest[:12]}, has other {', '.join(causes(parts))}"
            )
