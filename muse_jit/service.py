"""The whole path on one page: constants → key → find → lock → find again → compile → publish → load.

`JitService.get` walks it for one kernel. The second time it is a dictionary look-up and nothing else.
"""

import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from muse_jit.constants.base import ConstantSet
from muse_jit.counters import Counters, Trouble
from muse_jit.errors import LoadError, SourceChanged, UsageError
from muse_jit.kernels.registry import KernelFamily, class_text, family_named
from muse_jit.key.kernel_key import KernelKey
from muse_jit.key.memo import Memo
from muse_jit.key.options import check_options
from muse_jit.key.source import Source, source_of
from muse_jit.key.target import Target, check_arch, device_arch, host_arch
from muse_jit.key.toolchain import Toolchain, identify, runtime_library
from muse_jit.policy import Policy
from muse_jit.request import Request, Stored
from muse_jit.settings import Settings
from muse_jit.spans import Spans
from muse_jit.store.layout import Layout, default_root
from muse_jit.store.lookup import Hit, Miss, Reason, find
from muse_jit.store.memo import load_memo

if TYPE_CHECKING:  # the loader imports tvm_ffi, which `muse-jit plan` and the tools do without
    from muse_jit.ensure import Peers
    from muse_jit.loader.kernel import Kernel
    from muse_jit.report import Report
    from muse_jit.single_flight import SingleFlight

logger = logging.getLogger("muse_jit")


class JitService:
    """Kernels for one target, from one cache folder. Safe to use from several threads.

    Raises:
        TargetError: no architecture was given and no device can be asked.
        ToolchainError: no compiler is installed and the cache does not say which one filled it.
    """

    def __init__(self, arch: str | None = None, settings: Settings | None = None) -> None:
        self.settings = settings if settings is not None else Settings.from_environ()
        root, self.root_origin = default_root(self.settings.cache_dir, self.settings.vllm_cache_root)
        self.layout = Layout(root, self.settings.share)
        self.options = check_options(self.settings.compile_options)
        self.memo = Memo(load_memo(self.layout) if self.settings.mode != "off" else None)
        self.toolchain = _identify(self.settings, self.layout, self.memo)
        arch = device_arch() if arch is None else check_arch(arch)
        self.target = Target(arch, self.toolchain.cuda, self.toolchain.host)
        self.counters = Counters()
        self._memory: dict[ConstantSet, Kernel] = {}
        self._sources: dict[str, Source] = {}
        self.trouble = Trouble(self.settings.strict)
        self.policy = Policy(self.settings, self.target, self.toolchain, self.layout, self.trouble)
        self._state = threading.Lock()
        self._building: dict[ConstantSet, threading.Lock] = {}
        self._runtime: str | None = None
        self._flight: SingleFlight | None = None
        self.verified: set[str] = set()
        """Digests of entries that this process compiled again and found equal (mode verify)."""
        _services.add(self)

    def for_arch(self, arch: str) -> "JitService":
        """A service for another architecture that goes by the same sources, read once. Raises: as the class."""
        other = JitService(arch, self.settings)
        other._sources = self._sources
        return other

    def get(self, constants: ConstantSet) -> "Kernel":
        """The kernel of a constant set: from memory, from disk, or compiled now, by this process or by another.

        Raises:
            CompileDuringCapture: it is not in memory, and a CUDA graph is being captured on the current stream.
            ConstantsError: the constants are not possible on this target.
            UsageError: the family is not registered.
            CompileError: it does not compile; carries the log.
            LinkerMissing, ToolchainError, LoadError: this machine lacks something, named in the message.
            MissForbidden: it is not in the cache and compiling is forbidden.
            VerifyMismatch: what is in the cache is not what it compiles to (mode verify).
        """
        kernel = self._memory.get(constants)
        if kernel is not None:
            self.counters.memory_hits += 1
            return kernel
        self.policy.guard_capture(constants)
        since = time.monotonic()
        with self._one_thread(constants):
            kernel = self._memory.get(constants)
            if kernel is None:
                self._open_runtime()  # first: what this machine lacks must not be blamed on an entry
                stored = self._obtain(constants, since, Spans())
                kernel = self._memory[constants] = self._load(constants, stored, since)[0]
            return kernel

    def ensure(self, wanted: Iterable[ConstantSet], *, peers: "Peers | None" = None) -> "Report":
        """Have all these kernels in the cache and loaded in this process, and say what it took.

        Processes that ask for the same at the same time share the compiling (see `fill`); with `peers`, the ranks of
        a process group (`ops.ranks.TorchPeers`), hosts that have the cache folder in common do, too, and all ranks
        must call. A kernel that does not compile is a failure in the report, and `get` raises for it.

        Raises:
            CompileDuringCapture, LinkerMissing, ToolchainError: as `get`.
            MissForbidden: one or more are not in the cache and compiling is forbidden; names the first.
        """
        from muse_jit.ensure import ensure

        return ensure(self, list(dict.fromkeys(wanted)), peers)

    def obtain(self, constants: ConstantSet, *, force: bool = False, since: float | None = None) -> Stored:
        """Make sure that a kernel is in the cache, without loading it: what a warm-up does on a machine without GPU.

        `force` compiles it also when it is there, and replaces the entry. `since`, by `time.monotonic()`, is when it
        was asked for: somebody else's failure after that is the answer.

        Raises: as `get`, but for LoadError.
        """
        self.policy.guard_capture(constants)
        return self._obtain(constants, time.monotonic() if since is None else since, Spans(), force=force)

    def find(self, constants: ConstantSet) -> Hit | Miss:
        """Look a kernel up on disk, verified, without compiling or loading it."""
        return self.look_up(self.key_of(constants)[1])

    @property
    def flight(self) -> "SingleFlight":
        """What builds missing kernels; a warm start does not even import it."""
        if self._flight is None:
            from muse_jit.single_flight import SingleFlight

            self._flight = SingleFlight(
                self.settings, self.layout, self.toolchain, self.memo, self.counters, self.trouble
            )
        return self._flight

    def in_memory(self, constants: ConstantSet) -> bool:
        """Whether `get` would answer at once."""
        return constants in self._memory

    def keep(self, constants: ConstantSet, stored: Stored, spans: Spans) -> Stored:
        """Load what was obtained, so that `get` answers at once; returns what was loaded. Raises: as `get`."""
        with self._one_thread(constants):
            if constants not in self._memory:
                self._memory[constants], stored = self._load(constants, stored, time.monotonic(), spans)
            return stored

    def serving(self) -> None:
        """From now on the engine serves, and a miss is late: MUSE_JIT_LATE_COMPILE says what becomes of it.

        The compile servers of this process end: nobody should need them any more.
        """
        from muse_jit.compiler.forkserver import end_servers

        self.policy.serving = True
        end_servers()

    def _obtain(
        self,
        constants: ConstantSet,
        since: float,
        spans: Spans,
        *,
        force: bool = False,
        rejected: int | None = None,
    ) -> Stored:
        """Find or build; once more, under the new key, where the source was edited meanwhile."""
        for last in (False, True):
            with spans.measure("look-up"):
                request = self.request_for(constants, since, spans)
                found = self.look_up(request.key, rejected=rejected, force=force)
            if isinstance(found, Hit):
                self._verify(request, found)
                return Stored(found, "hit")
            self.policy.may_compile(request, found)
            try:
                return self.flight.build(request, found, lambda: self.look_up(request.key, rejected), force=force)  # noqa: B023
            except SourceChanged:
                if last:
                    raise
                self.forget_sources()
        raise AssertionError("not reached")

    def key_of(self, constants: ConstantSet) -> tuple[KernelFamily, KernelKey]:
        """The family and the key of a constant set on this target.

        Raises:
            UsageError: the family is not registered, or these constants are not of its class.
            ConstantsError: the constants are not possible on this target.
        """
        family = family_named(constants.family)
        if not isinstance(constants, family.constants_class):
            raise UsageError(f"{family.name} takes {family.constants_class.__name__}, not {type(constants).__name__}")
        constants.validate_for(self.target.arch)
        source = self._source(family)
        key = KernelKey(
            family.name,
            constants.as_dict(),
            self.target,
            self.toolchain.parts,
            source.digest,
            family.build,
            self.options,
        )
        return family, key

    def request_for(self, constants: ConstantSet, since: float, spans: Spans) -> Request:
        """What a constant set asks of the cache and the compiler. Raises: as `key_of`."""
        family, key = self.key_of(constants)
        return Request(family, constants, key, self._source(family), since, spans)

    def look_up(self, key: KernelKey, rejected: int | None = None, *, force: bool = False) -> Hit | Miss:
        """Look a key up, count and report. The entry `rejected` (an inode) cannot be opened, however sound it is."""
        found = Miss(Reason.DISABLED) if self.settings.mode == "off" else find(self.layout, key)
        if isinstance(found, Hit) and rejected is not None and found.inode == rejected:
            found = Miss(Reason.UNLOADABLE, "it cannot be opened and could not be set aside", rejected)
        if isinstance(found, Hit) and force:
            return Miss(Reason.REPLACED, "", found.inode)
        if isinstance(found, Hit):
            self._touch(found)
            self.counters.disk_hits += 1
            return found
        with self._state:
            self.counters.misses[found.reason] = self.counters.misses.get(found.reason, 0) + 1
        if found.reason not in (Reason.ABSENT, Reason.DISABLED):
            self.trouble.warn(f"{key.kernel} {key.digest[:12]} in {self.layout.root} is {found.reason}: {found.detail}")
        return found

    def forget_sources(self) -> None:
        """Read the kernels' sources again at the next key: one was edited."""
        self._sources.clear()

    def _open_runtime(self) -> str:
        """The runtime library that kernels need, opened."""
        from muse_jit.loader.kernel import preload

        if self._runtime is None:
            runtime = runtime_library(self.target.cuda, self.settings.runtime_lib)
            preload(runtime)
            self._runtime = runtime
        return self._runtime

    def _load(
        self, constants: ConstantSet, stored: Stored, since: float, spans: Spans | None = None
    ) -> "tuple[Kernel, Stored]":
        """Load; an entry that is intact and cannot be opened is set aside and rebuilt, once."""
        from muse_jit.loader.kernel import load

        runtime, spans = self._open_runtime(), spans or Spans()
        for last in (stored.status == "compiled", True):
            try:
                with spans.measure("load"):
                    return load(stored.hit.entry, stored.hit.artifact, runtime), stored
            except LoadError as error:
                if last or error.machine:
                    raise
                self._reject(stored.hit, str(error))
            stored = self._obtain(constants, since, spans, rejected=stored.hit.inode)
        raise AssertionError("not reached")

    def _verify(self, request: Request, hit: Hit) -> None:
        """In mode verify, compile a hit again and compare, once per process."""
        if self.settings.mode == "verify" and request.key.digest not in self.verified:
            self.flight.compare(request, hit)
            self.verified.add(request.key.digest)

    def _touch(self, hit: Hit) -> None:
        """Note once a day that an entry is in use."""
        now = time.time()
        if self.settings.mode != "readonly" and hit.last_used is not None and abs(now - hit.last_used) > 86400:
            from muse_jit.store.prune import touch

            touch(self.layout, hit.entry.digest, hit.last_used, now)

    def _reject(self, hit: Hit, why: str) -> None:
        """Set an entry aside whose verified bytes cannot be opened."""
        from muse_jit.store.publish import set_aside

        entry = hit.entry
        with self._state:
            self.counters.misses[Reason.UNLOADABLE] = self.counters.misses.get(Reason.UNLOADABLE, 0) + 1
        self.trouble.warn(f"{entry.kernel} {entry.digest[:12]} in {self.layout.root} is {Reason.UNLOADABLE}: {why}")
        if self.settings.mode != "readonly":
            set_aside(self.layout, entry.digest, Miss(Reason.UNLOADABLE, why, hit.inode))

    def _source(self, family: KernelFamily) -> Source:
        if family.name not in self._sources:
            self._sources[family.name] = source_of(
                family.build, also=class_text(family.constants_class), memo=self.memo
            )
        return self._sources[family.name]

    @contextlib.contextmanager
    def _one_thread(self, constants: ConstantSet) -> Iterator[None]:
        """Threads that want the same kernel queue here; those that want another do not meet."""
        with self._state:
            lock = self._building.setdefault(constants, threading.Lock())
        try:
            with lock:
                yield
        finally:
            with self._state:
                self._building.pop(constants, None)


def _identify(settings: Settings, layout: Layout, memo: Memo) -> Toolchain:
    from muse_jit.store.publish import recorded_toolchains

    toolchain = identify(
        settings.cuda,
        host_arch(),
        check=settings.toolchain_check,
        recorded=recorded_toolchains(layout),
        memo=memo,
    )
    for file in toolchain.modified:
        logger.warning("installed file differs from what its distribution recorded: %s", file)
    return toolchain


_services: "weakref.WeakSet[JitService]" = weakref.WeakSet()


def _after_fork_in_child() -> None:
    """Locks that threads of the parent held at the fork are nobody's in the child, which begins with free ones."""
    for service in list(_services):
        service._state, service._building = threading.Lock(), {}
        service.trouble.forget_threads()


os.register_at_fork(after_in_child=_after_fork_in_child)
