"""Kill or stop a process right before or right after each call of it that changes the disk, or let that call fail.

A driver process forks one child for each such call; the child wraps the functions of `os` that change files, does
what it is told, and sends itself a signal (or raises OSError) at its k-th call. The driver looks at what that leaves
behind: entries, litter, processes, and what the next processes get. It runs on until a child has no k-th call and
ends untouched.

The driver is a process of its own (`drive` starts it) and the reaper of orphans, so that no process escapes it.
"""

import builtins
import contextlib
import ctypes
import dataclasses
import fcntl
import functools
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import time

from field.barrier import NO_COMPILER
from support.process import alive, run

from muse_jit.spans import Span

_OS_CALLS = [
    "mkdir",
    "open",
    "write",
    "pwrite",
    "ftruncate",
    "truncate",
    "fsync",
    "fdatasync",
    "chmod",
    "fchmod",
    "rename",
    "replace",
    "link",
    "symlink",
    "unlink",
    "remove",
    "rmdir",
    "utime",
]
_PR_SET_CHILD_SUBREAPER = 36
_SECONDS = 60.0
VALUE = 5


class Tap:
    """Counts the calls that change the disk, and sends this process `number` before or after its call `at`.

    A negative `number` is an error instead: the call is not made and fails with it.
    """

    def __init__(self, at, side, number, root):
        self.at, self.side, self.number, self.root = at, side, number, root
        self.labels = []
        self._inside = False
        self._undo = []

    def __enter__(self):
        for name in _OS_CALLS:
            self._wrap(os, name, _opens_for_writing if name == "open" else None)
        self._wrap(builtins, "open", lambda arguments, named: set(_mode(arguments, named)) & set("wax+"))
        self._wrap(fcntl, "flock", None)
        self._wrap(subprocess.Popen, "_execute_child", None)
        return self

    def __exit__(self, *_):
        for owner, name, real in self._undo:
            setattr(owner, name, real)

    def _wrap(self, owner, name, counts):
        real = getattr(owner, name)

        @functools.wraps(real)
        def call(*arguments, **named):
            # A call made by a counted call (open of a file object opens through os) is the same step.
            if self._inside or (counts is not None and not counts(arguments, named)):
                return real(*arguments, **named)
            step = len(self.labels)
            self.labels.append(f"{name} {self._place(arguments)}".strip())
            if step == self.at and self.number < 0:
                raise OSError(-self.number, os.strerror(-self.number))
            if step == self.at and self.side == "before":
                os.kill(os.getpid(), self.number)
            self._inside = True
            try:
                return real(*arguments, **named)
            finally:
                self._inside = False
                if step == self.at and self.side == "after":
                    os.kill(os.getpid(), self.number)

        self._undo.append((owner, name, real))
        setattr(owner, name, call)

    def _place(self, arguments):
        first = next((a for a in arguments if isinstance(a, str | int)), "")
        if isinstance(first, int):
            first = _path_of(first)
        place = first.removeprefix(self.root).lstrip("/") if first.startswith(self.root) else os.path.basename(first)
        place = place.replace(socket.gethostname(), "HOST")
        return re.sub(
            r"\b[0-9a-f]{64}\b|\b[0-9a-f]{32}\b|(?<=-v1/)[0-9a-f]{2}\b|(?<=muse_jit-)\w+|(?<=-toy-)[0-9a-f]{12}",
            "*",
            place,
        )


def _path_of(descriptor):
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return ""


def _mode(arguments, named):
    return named.get("mode", arguments[1] if len(arguments) > 1 else "r")


def _opens_for_writing(arguments, named):
    flags = named.get("flags", arguments[1] if len(arguments) > 1 else 0)
    return flags & (os.O_CREAT | os.O_TRUNC)


@dataclasses.dataclass
class Trial:
    """What one signal at one step left, and what happened then. Also the JSON of the driver."""

    step: int
    side: str
    label: str = ""
    ending: str = ""
    """What became of the child: "SIGKILL", "SIGSTOP", "failed call", or "untouched"."""
    half_entries: list = dataclasses.field(default_factory=list)
    """Entry folders that are not whole, after the signal or at the end."""
    litter: list = dataclasses.field(default_factory=list)
    """Files of the cache folder, at the end, that have no place in it; random parts are stars."""
    staging: int = 0
    """Folders below staging-v1 at the end."""
    orphans: list = dataclasses.field(default_factory=list)
    """Processes that were alive five seconds after the child's death."""
    second: int = -1
    """What the second process got; a third and the stopped one follow."""
    third: int = -1
    resumed: int = -1
    lock_seconds: float = 0.0
    """How long the second process waited for locks."""
    compiles: int = 0
    """In all."""
    found: str = ""
    """What a look-up at the end finds."""
    errors: str = ""
    """What a process that ended with 99 raised."""


def drive(tmp_path, action, side, number, **options):
    """Run a driver; returns its trials. `action` is "publish" or "get"; options: steps, real, stall_limit."""
    spec = {"action": action, "side": side, "number": int(number), "folder": str(tmp_path / "work"), **options}
    out = run(f"from field.syscalls import main\nmain({spec!r})", block=NO_COMPILER, timeout=240, TMPDIR=tmp_path)
    return [Trial(**values) for values in json.loads(out.splitlines()[-1])]


def main(spec):
    """The driver: all trials of one kind; prints them as JSON."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    driver = _Driver(**spec)
    try:
        print(json.dumps([dataclasses.asdict(trial) for trial in driver.trials()]))
    finally:
        driver.end_children()


class _Driver:
    def __init__(self, action, side, number, folder, steps=None, real=False, stall_limit=1200.0):
        self.action, self.side, self.number, self.real, self.steps = action, side, number, real, steps
        self.folder = pathlib.Path(folder)
        self.folder.mkdir()
        self.root = str(self.folder / "cache")
        self.count = self.folder / "count"
        self.stall_limit = stall_limit
        # Everything is imported before the forks, so that a trial takes milliseconds.
        import filelock  # noqa: F401
        from support import toy

        import muse_jit.compiler.build
        import muse_jit.loader.kernel
        import muse_jit.store.publish

        self.toy, self.build_module = toy, muse_jit.compiler.build
        self.constants = toy.ToyConstants(value=VALUE, count_file=str(self.count))
        service = self.service()
        self.key = service.key_of(self.constants)[1]
        self.built = service.obtain(self.constants).hit
        muse_jit.compiler.forkserver.end_servers()  # or every trial would find this process's own
        if not real:
            self.build_module.build = self._stub
        shutil.rmtree(self.root)

    def service(self, stall_limit=None):
        from muse_jit.service import JitService
        from muse_jit.settings import Settings

        limit = self.stall_limit if stall_limit is None else stall_limit
        return JitService("sm_90a", Settings().with_options(cache_dir=self.root, stall_limit=limit))

    def _stub(self, *arguments, **named):
        """Stands for the compiler: counts, and returns what the real one made of the same key."""
        self._count()
        return self.build_module.Built(self.built.artifact, (Span("compile", time.monotonic(), 0.01, 1, 1),), [])

    def _count(self):
        descriptor = os.open(self.count, os.O_WRONLY | os.O_APPEND)  # not counted as a step: creates nothing
        os.lseek(descriptor, 0, os.SEEK_END)
        _REAL_WRITE(descriptor, b"stub\n")
        os.close(descriptor)

    def act(self):
        """What the child does; returns the kernel's value."""
        if self.action == "get":
            return int(self.service().get(self.constants)())
        from muse_jit.store.publish import publish, record_toolchain

        service = self.service()
        publish(service.layout, self.built.entry, self.built.artifact)
        record_toolchain(service.layout, service.toolchain, 1000.0)
        return VALUE

    def trials(self):
        result = []
        for step in range(10_000) if self.steps is None else self.steps:
            trial = Trial(step, self.side)
            self.fresh()
            untouched = self.one(trial)
            result.append(trial)
            if untouched:
                return result
        return result

    def fresh(self):
        shutil.rmtree(self.root, ignore_errors=True)
        self.count.write_text("")

    def one(self, trial):
        child = self.fork(self.act, Tap(trial.step, trial.side, self.number, self.root))
        status = self.wait(child, os.WUNTRACED)
        stopped = os.WIFSTOPPED(status)
        labels = (self.folder / "labels").read_text().splitlines()
        if os.WIFEXITED(status):
            trial.ending = "failed call" if self.number < 0 and len(labels) > trial.step else "untouched"
        else:
            trial.ending = signal.Signals(os.WSTOPSIG(status) if stopped else os.WTERMSIG(status)).name
        trial.half_entries = self.half_entries()
        if not stopped:
            trial.orphans = self.orphans()
        trial.second, trial.lock_seconds = self.ask()
        if stopped:
            trial.half_entries += self.half_entries()
            trial.third, _ = self.ask()
            os.kill(child, signal.SIGCONT)
            trial.resumed = _code(self.wait(child))
        elif os.WIFEXITED(status):
            trial.resumed = _code(status)
        trial.label = "" if trial.ending == "untouched" else labels[trial.step]
        self.look(trial)
        return trial.ending == "untouched"

    def fork(self, action, tap=None):
        """Start a child that ends with the value of `action` as its exit code, and never returns here."""
        labels = self.folder / "labels"
        if tap is not None:
            labels.write_text("")
        child = os.fork()
        if child:
            return child
        try:
            if tap is None:
                os._exit(action())
            descriptor = os.open(labels, os.O_WRONLY | os.O_APPEND)
            tap.labels = _Written(descriptor)
            with tap:
                value = action()
            os._exit(value)
        except BaseException:
            import traceback

            descriptor = os.open(self.folder / "errors", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            _REAL_WRITE(descriptor, traceback.format_exc().encode())
            os.close(descriptor)
            os._exit(99)

    def ask(self):
        """Get the kernel in another process; its value and the seconds it waited for locks."""
        waited = self.folder / "waited"
        waited.write_text("0")

        def action():
            from muse_jit.store import lock

            hold = lock.hold

            @contextlib.contextmanager
            def timed(*arguments, **named):
                started = time.monotonic()
                with hold(*arguments, **named) as held:
                    waited.write_text(str(time.monotonic() - started))
                    yield held

            lock.hold = timed
            return int(self.service().get(self.constants)())

        status = self.wait(self.fork(action))
        return _code(status), float(waited.read_text())

    def wait(self, child, options=0):
        deadline = time.monotonic() + _SECONDS
        while time.monotonic() < deadline:
            pid, status = os.waitpid(child, options | os.WNOHANG)
            if pid:
                return status
            time.sleep(0.002)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise TimeoutError("a child neither ended nor stopped")

    def orphans(self):
        """Processes that the child left: the driver inherits them, and gives them five seconds to end."""
        deadline = time.monotonic() + 5.0
        while (left := _children()) and time.monotonic() < deadline:
            time.sleep(0.005)
        return [_command(pid) for pid in left]

    def end_children(self):
        for pid in _children():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    def half_entries(self):
        from muse_jit.store.layout import Layout
        from muse_jit.store.lookup import Hit, read_entry

        layout = Layout(self.root)
        folders = pathlib.Path(layout.entries).glob("*/*")
        return [p.name for p in folders if not isinstance(read_entry(layout, p.name), Hit)]

    def look(self, trial):
        from muse_jit.store.lookup import Hit

        found = self.service().find(self.constants)
        trial.found = "hit" if isinstance(found, Hit) and found.artifact == self.built.artifact else str(found)[:200]
        trial.half_entries += self.half_entries()
        trial.litter = litter(self.root)
        staging = pathlib.Path(self.root, "staging-v1")
        trial.staging = len(list(staging.iterdir())) if staging.is_dir() else 0
        errors = self.folder / "errors"
        trial.errors = errors.read_text() if errors.exists() else ""
        errors.unlink(missing_ok=True)
        trial.compiles = self.toy.compiles(self.count)


class _Written(list):
    """A list of labels that also goes to a file, from where the driver reads what a killed child did."""

    def __init__(self, descriptor):
        super().__init__()
        self._descriptor = descriptor

    def append(self, label):
        super().append(label)
        _REAL_WRITE(self._descriptor, label.encode() + b"\n")


_REAL_WRITE = os.write
_PLACES = re.compile(
    r"README|CACHEDIR\.TAG|toolchain\.json|memo\.json|(locks|staging|set-aside)-v1/.*"
    r"|entries-v1/([0-9a-f]{2})/\2[0-9a-f]{62}/(kernel\.so|entry\.json)"
)


def litter(root):
    """Files below a cache folder that belong neither to an entry nor below locks, staging or set-aside."""
    names = (str(p.relative_to(root)) for p in pathlib.Path(root).rglob("*") if p.is_file())
    return sorted(re.sub(r"[0-9a-f]{32}", "*", n) for n in names if not _PLACES.fullmatch(n))


def _code(status):
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else -os.WTERMSIG(status)


def _children():
    """Live children of this process; those that ended are collected."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as file:
                if int(file.read().rpartition(")")[2].split()[1]) == os.getpid():
                    found.append(int(name))
    for pid in list(found):
        if not alive(pid):
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
            found.remove(pid)
    return found


def _command(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()[:200]
    except OSError:
        return ""
