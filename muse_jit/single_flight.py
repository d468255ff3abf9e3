"""Compile a key once per host: hold its lock, look again, compile, publish. Trouble of the cache costs a warning.

The stages of a miss, of which `JitService.obtain` sees one call. What a request is answered with is `Stored`: an
artifact, whether it was found or built, and, if it could not be stored, why.
"""

import contextlib
import functools
import logging
import os
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from muse_jit import __version__
from muse_jit.counters import Counters, Trouble
from muse_jit.errors import CacheUnusable, CompileEnded, CompileError, SourceChanged, VerifyMismatch
from muse_jit.key.encoding import content_digest
from muse_jit.key.kernel_key import KernelKey
from muse_jit.key.memo import Memo
from muse_jit.key.toolchain import Toolchain, runtime_library
from muse_jit.remedy import warmup_command
from muse_jit.request import Request, Stored
from muse_jit.settings import SLOT_SECONDS, Settings
from muse_jit.store.cubin import cubins
from muse_jit.store.entry import Entry
from muse_jit.store.layout import STAGING, Layout
from muse_jit.store.lookup import TO_SET_ASIDE, Hit, Miss, Reason

if TYPE_CHECKING:  # importing the lock imports filelock, which a hit does without
    from muse_jit.store.lock import Held

logger = logging.getLogger("muse_jit")

PRUNE_EVERY = 100
"""Publishes of one process between two looks at the size of the cache; the first one looks, too."""


class SingleFlight:
    """Builds the missing kernels of one service."""

    def __init__(
        self,
        settings: Settings,
        layout: Layout,
        toolchain: Toolchain,
        memo: Memo,
        counters: Counters,
        trouble: Trouble,
    ) -> None:
        self.settings, self.layout, self.toolchain, self.memo = settings, layout, toolchain, memo
        self.counters, self.trouble = counters, trouble
        self.stores = settings.mode not in ("off", "readonly")
        self._published = 0
        self._limit: int | None = None

    def build(
        self,
        request: Request,
        miss: Miss,
        look_again: Callable[[], Hit | Miss],
        *,
        force: bool = False,
        waited: float = 0.0,
        has_place: bool = False,
    ) -> Stored:
        """Compile, unless somebody else did meanwhile, and publish; waits for who is at it.

        `waited` are the seconds that were waited for the key's holder before; `has_place` says that the caller has a
        worker's place already.

        Raises:
            CompileError: it does not compile, here or where this request waited for it.
            LinkerMissing, ToolchainError: this machine lacks something.
        """
        # A damaged entry in the way must not end anybody's waiting.
        with self._lock(request, force or miss.reason in TO_SET_ASIDE, waited) as held:
            return self._build_held(request, miss, look_again, held, force, has_place)

    def claim(
        self, request: Request, miss: Miss, look_again: Callable[[], Hit | Miss], *, force: bool = False
    ) -> Stored | None:
        """`build` without waiting: None where somebody else is at it. The caller has a worker's place already."""
        with contextlib.ExitStack() as stack:
            held = None
            if self.stores:
                from muse_jit.store.lock import try_lock

                try:
                    self.layout.create()
                    path = self.layout.lock(request.key.digest)
                    held = stack.enter_context(try_lock(self.layout, path, request.what))
                    if held is None:
                        return None
                except (OSError, CacheUnusable) as error:
                    self.trouble.warn(f"no lock in the cache ({error}); compiling without it")
            return self._build_held(request, miss, look_again, held, force, has_place=True)

    def compare(self, request: Request, hit: Hit, *, has_place: bool = False) -> None:
        """Compile what is in the cache again and compare, without touching the entry.

        Raises:
            VerifyMismatch: the bytes differ; says whether the GPU code does.
            CompileError, LinkerMissing, ToolchainError: as `build`.
        """
        built = self._compile(request, has_place=has_place)
        self.counters.verified += 1
        if built.artifact == hit.artifact:
            return
        command = warmup_command(request.constants, request.key.target, self.layout.root, self.settings)
        same = list(cubins(built.artifact)) == list(cubins(hit.artifact))
        what = "its GPU code is the same, the host code around it differs" if same else "its GPU code differs"
        raise VerifyMismatch(
            f"{request.key.kernel} {request.key.digest[:12]} in {self.layout.root} is not what compiling it gives "
            f"now: {what} (stored {hit.entry.artifact_digest[:12]}, compiled {built.entry.artifact_digest[:12]}); "
            f"replace it with: {command} --force"
        )

    def leave_token(self) -> str:
        """Leave an empty file in the cache, by which others can tell that they see the same folder; its path.

        Raises:
            OSError, CacheUnusable: nothing can be written there.
        """
        if not self.stores:
            raise CacheUnusable(f"mode {self.settings.mode} writes nothing")
        self.layout.create()
        path = self.layout.unique(STAGING)
        self.layout.make_parents(path)
        self.layout.write_new(path, b"")
        return path

    def _build_held(
        self,
        request: Request,
        miss: Miss,
        look_again: Callable[[], Hit | Miss],
        held: "Held | None",
        force: bool,
        has_place: bool,
    ) -> Stored:
        """With the key's lock held, or without locks."""
        again = look_again() if held is not None and not force else miss
        if isinstance(again, Hit):
            return Stored(again, "hit")
        if held is not None and held.failure is not None and held.failure.answers(request.since):
            self.counters.failed += 1
            raise CompileError(held.failure.message, log_path=held.failure.log_path)
        try:
            built = self._compile(request, has_place=has_place)
        except CompileError as error:
            if held is not None and not isinstance(error, SourceChanged | CompileEnded):
                held.fail(str(error), error.log_path)
            raise
        with request.spans.measure("publish"):
            return self._publish(request.key, built, again)

    @contextlib.contextmanager
    def _lock(self, request: Request, force: bool, waited: float) -> "Iterator[Held | None]":
        """Hold the key's lock; None where there can be no lock, and the kernel is compiled without one."""
        if not self.stores:
            yield None
            return
        from muse_jit.store.lock import LockTimeout, hold

        def waiting(holder: str) -> None:
            self.counters.waited += 1
            logger.info("waiting for %s: compiled by %s", request.key.kernel, holder)

        held = None
        with contextlib.ExitStack() as stack:
            asked = time.monotonic()
            before = self.counters.waited
            try:
                self.layout.create()
                published = functools.partial(os.path.isdir, self.layout.entry(request.key.digest))
                until = None if force else published
                patience = self.settings.patience
                lock = hold(self.layout, request.key.digest, request.what, patience, waiting, until, waited)
                held = stack.enter_context(lock)
            except (OSError, CacheUnusable, LockTimeout) as error:
                self.trouble.warn(f"no lock in the cache ({error}); compiling without it")
            if self.counters.waited != before:
                request.spans.add("wait", asked)
            yield held

    @property
    def limit(self) -> int:
        """How many workers may run on this host at a time.

        Asked once: the memory of the workers that run is not free any more, and their places count already.
        """
        if self._limit is None:
            from muse_jit.compiler.limits import worker_limit

            self._limit = self.settings.workers or worker_limit()
        return self._limit

    @contextlib.contextmanager
    def place(self, patience: float, *, only_first: bool = False) -> Iterator[bool]:
        """One of the places for compile workers that all processes of this host share; whether one was got in time.

        `only_first`: see `worker_slot`.
        """
        from muse_jit.compiler.slots import private_layout, worker_slot

        got = True  # also where nobody can keep count
        with contextlib.ExitStack() as stack:
            for layout in (self.layout, private_layout()) if self.stores else (private_layout(),):
                try:
                    layout.create()  # which refuses a folder that others can write to
                    got = stack.enter_context(worker_slot(layout, self.limit, patience, only_first=only_first))
                    break
                except (OSError, CacheUnusable):
                    continue
            yield got

    def _compile(self, request: Request, *, has_place: bool) -> Hit:
        from muse_jit.compiler.build import build
        from muse_jit.store.publish import keep_log

        key = request.key
        logger.debug("compiling %s for %s: %s", key.kernel, key.target, request.constants)
        try:
            with contextlib.ExitStack() as stack:
                if not has_place:
                    asked = time.monotonic()
                    stack.enter_context(self.place(SLOT_SECONDS))
                    request.spans.add("wait", asked)
                built = build(
                    request.family,
                    request.constants,
                    key,
                    runtime_library=runtime_library(key.target.cuda, self.settings.runtime_lib),
                    source=request.source,
                    timeout=self.settings.compile_timeout,
                    cc=self.settings.cc,
                )
        except CompileEnded:
            raise
        except CompileError as error:
            self.counters.failed += 1
            if self.stores:
                with contextlib.suppress(CacheUnusable):
                    error.log_path = keep_log(self.layout, key.digest, error.log) or ""
            where = f"; full log: {error.log_path}" if error.log_path else ""
            raise type(error)(f"{error}{where}", error.log, error.log_path) from None
        self.counters.compiled += 1
        request.spans.spans += built.spans
        logger.debug("compiled %s in %.2f s", key.kernel, built.compile_seconds)
        entry = Entry(
            digest=key.digest,
            key=key.document,
            symbol=key.symbol,
            artifact_digest=content_digest(built.artifact),
            artifact_size=len(built.artifact),
            compile_seconds=round(built.compile_seconds, 4),
            link_seconds=round(built.link_seconds, 4),
            created=time.time(),
            created_by=f"muse_jit {__version__}",
            resources=built.resources,
        )
        return Hit(entry, built.artifact)

    def _publish(self, key: KernelKey, built: Hit, miss: Miss) -> Stored:
        """Store what was built; where that cannot be, the kernel is used from memory."""
        if not self.stores:
            return Stored(built, "compiled", f"mode {self.settings.mode} writes nothing")
        from muse_jit.store.publish import publish, record_toolchain, set_aside

        try:
            # One that is to be replaced is sound: it stays until its successor is on the disk.
            replaced = miss if miss.reason == Reason.REPLACED else None
            if miss.reason in TO_SET_ASIDE and replaced is None:
                set_aside(self.layout, key.digest, miss)
            publish(self.layout, built.entry, built.artifact, replaced)
        except (OSError, CacheUnusable) as error:
            self.counters.not_stored += 1
            self.trouble.warn(f"the cache cannot be written, kernels are used from memory: {error}")
            return Stored(built, "compiled", str(error))
        try:
            record_toolchain(self.layout, self.toolchain, built.entry.created)
            self._save_memo()
            self._keep_bounds()
        except (OSError, CacheUnusable) as error:
            self.trouble.warn(f"the cache cannot be tended (toolchain.json, memo.json, size, litter): {error}")
        return Stored(built, "compiled")

    def _save_memo(self) -> None:
        """Keep what was computed for this key and is not in the cache's memo yet."""
        if self.memo.new:
            from muse_jit.store.memo import save_memo

            self.memo.known = save_memo(self.layout, dict(self.memo.new))
            self.memo.new = {}

    def _keep_bounds(self) -> None:
        """Now and then prune to MUSE_JIT_MAX_BYTES and sweep litter."""
        self._published += 1
        if self._published % PRUNE_EVERY == 1:
            from muse_jit.store.prune import prune

            report = prune(self.layout, max_bytes=self.settings.max_bytes)
            if report.removed:
                logger.info("pruned %d kernels from %s", len(report.removed), self.layout.root)
