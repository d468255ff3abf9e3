"""The forking server: imports the compiler once, then forks one worker for each kernel.

Started by `forkserver.py` as `python -I server.py DESCRIPTOR PARENT CONFIG`, with a cleaned environment and no visible
GPU, in a session of its own. It never compiles, so it never has threads when it forks: a compile starts thread pools,
and a fork after that hangs or crashes. It imports nothing of muse_jit or of the kernels either: each worker imports
these as they are on disk at its time.

DESCRIPTOR is a Unix socket of message packets. Each packet is a worker's private folder, which holds request.json,
with a second socket attached. On that one the server answers once, with the worker's wait status; when the other end
is shut down before, the worker is ended. The server ends, with all workers, when its parent is gone, when the first
socket is closed, or when it had nothing to do for IDLE_SECONDS.
"""

import contextlib
import gc
import json
import os
import selectors
import signal
import socket
import sys
import time
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType
from typing import Any

IDLE_SECONDS = 30.0
"""A server that has had no worker for so long ends: 150 MiB that nobody uses."""


STACK_SECONDS = 0.05
"""What a worker that is to be ended has for writing down where it was."""


class Server:
    """One server process."""

    def __init__(self, control: socket.socket, parent: int, worker: ModuleType, imported: tuple[float, float]) -> None:
        self.control, self.parent, self.worker = control, parent, worker
        self.imported: tuple[float, float] | None = imported  # for the first worker to report
        self.workers: dict[int, socket.socket] = {}
        self.selector = selectors.DefaultSelector()
        self.wake, wake_writer = socket.socketpair()
        self.wake.setblocking(False)
        wake_writer.setblocking(False)
        self.wake_writer = wake_writer  # kept open
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(wake_writer.fileno(), warn_on_full_buffer=False)
        self.selector.register(self.wake, selectors.EVENT_READ, self._reap)
        self.selector.register(control, selectors.EVENT_READ, self._start)
        with contextlib.suppress(OSError):  # before Linux 5.3: found out by asking, below
            self.selector.register(os.pidfd_open(parent), selectors.EVENT_READ, self._end_all)

    def run(self) -> None:
        """Serve until there is no reason to; does not return."""
        last_busy = time.monotonic()
        while True:
            for key, _ in self.selector.select(0.5):
                key.data()
            if os.getppid() != self.parent:
                self._end_all()
            self._reap()  # whatever became of the wake-up
            if self.workers:
                last_busy = time.monotonic()
            elif time.monotonic() - last_busy > IDLE_SECONDS:
                os._exit(0)

    def _start(self) -> None:
        data, descriptors, _, _ = socket.recv_fds(self.control, 1 << 16, 1)
        if not data or not descriptors:
            self._end_all()
        client = socket.socket(fileno=descriptors[0])
        try:
            pid = os.fork()
        except OSError as error:
            with contextlib.suppress(OSError):
                client.send(str(error).encode())
            client.close()
            return
        if pid == 0:
            server = os.getppid()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            # Nothing of the server's stays open here: an end that a worker holds would hide that the server died.
            for open_socket in (client, self.control, self.wake, self.wake_writer, *self.workers.values()):
                open_socket.close()
            self.selector.close()
            self.worker.main(data.decode(), server, self.imported)
            os._exit(1)
        self.imported = None
        self.workers[pid] = client
        self.selector.register(client, selectors.EVENT_READ, lambda: self._abandoned(pid))

    def _abandoned(self, pid: int) -> None:
        """The one who asked for this worker does not want it any more."""
        client = self.workers.get(pid)
        if client is not None:  # or it ended in this very moment
            self.selector.unregister(client)
            # A compile that hung: where, is for its log, which the one who gave up reads after the worker's end.
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGUSR1)
            time.sleep(STACK_SECONDS)
            _kill_group(pid)

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self.wake.recv(4096):
                pass
        for pid in list(self.workers):
            # Looked at before it is reaped: as long as it is not, nobody else can have its number as a group.
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                continue
            _kill_group(pid)
            _, status = os.waitpid(pid, 0)
            client = self.workers.pop(pid)
            with contextlib.suppress(KeyError):
                self.selector.unregister(client)
            with contextlib.suppress(OSError):
                client.send(str(status).encode())
            client.close()

    def _end_all(self) -> None:
        for pid in self.workers:
            _kill_group(pid)
        os._exit(0)


def _kill_group(pid: int) -> None:
    """End a worker and what it started; it may not have made its group yet."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def _load_worker() -> ModuleType:
    """worker.py beside this file, without importing the package around it."""
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "worker.py")
    spec = spec_from_file_location("_muse_jit_compile_worker", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Import what is to be imported once, then serve."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the caller's may keep SIGCHLD away, and is the workers' too
    control, parent = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    config: dict[str, Any] = json.loads(sys.argv[3])
    worker = _load_worker()
    sys.path[:] = config["sys_path"]
    if not config["needs_torch"]:
        # tvm_ffi and the DSL import torch where they find it: 1.5 s of a 2 s compile that does not use it.
        sys.modules["torch"] = None  # type: ignore[assignment]
    started = time.monotonic()
    if config["needs_cutlass"]:
        try:
            import cutlass  # noqa: F401
        except BaseException:
            # Each worker tries again and has the reason in its log.
            for name in [n for n in sys.modules if n.partition(".")[0] == "cutlass"]:
                del sys.modules[name]
    imported = (started, time.monotonic() - started)
    gc.freeze()  # what is there now is shared with the workers, as long as no collection touches it
    Server(control, parent, worker, imported).run()


if __name__ == "__main__":
    main()
