"""The forking servers of this process: started when first needed, one for each set-up, kept for what comes next.

A set-up is everything a server has from its start: environment, search path, what it imports. A process has one
server in general. After a fork the child starts its own; the server notices when its parent is gone.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from typing import BinaryIO

from muse_jit.errors import CompileEnded, CompileError

_SERVER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "server.py")
_GRACE = 5.0
"""Seconds a server has to end a worker; one that has stopped itself is then ended with all its workers."""


class ServerGone(Exception):
    """The server died before the worker ended, which says nothing of the worker's kernel. Carries its last words."""


class _Server:
    def __init__(self, environment: Mapping[str, str], config: str) -> None:
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.ended = False
        self.log = _log_file()
        self._start(theirs, environment, config)

    def _start(self, theirs: socket.socket, environment: Mapping[str, str], config: str) -> None:
        with contextlib.ExitStack() as stack, theirs:
            stack.callback(self.forget)  # unless it starts
            self.process = subprocess.Popen(
                [sys.executable, "-I", _SERVER, str(theirs.fileno()), str(os.getpid()), config],
                stdin=subprocess.DEVNULL,
                stdout=self.log.fileno(),
                stderr=self.log.fileno(),
                cwd="/",
                env=dict(environment),
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C at the terminal reaches the caller, which ends the workers in order
            )
            stack.pop_all()

    def run(self, folder: str, timeout: float) -> int | None:
        """Have a worker do the request in `folder`; its wait status, or None if it had to be ended at `timeout`.

        Raises:
            ServerGone: the server died meanwhile.
        """
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                try:
                    socket.send_fds(self.control, [folder.encode()], [theirs.fileno()])
                except OSError as error:
                    raise ServerGone(str(error)) from None
            status = self._answer(ours, timeout)
            if status is None:
                ours.shutdown(socket.SHUT_WR)  # which tells the server, whoever else has a copy of this end
                if self._answer(ours, _GRACE) is None:
                    self.kill()  # its other workers' kernels are not to blame: they get another server
            return status

    def _answer(self, ours: socket.socket, timeout: float) -> int | None:
        ours.settimeout(timeout)
        try:
            data = ours.recv(64)
        except TimeoutError:
            return None
        except OSError as error:
            raise ServerGone(str(error)) from None
        if not data:
            raise ServerGone(self.last_words())
        if not data.isdigit():
            raise CompileError(f"the compile server could not start a worker: {data.decode('utf-8', 'replace')}")
        return int(data)

    def last_words(self) -> str:
        """What a server that died printed."""
        with contextlib.suppress(OSError, ValueError):
            return os.pread(self.log.fileno(), 1 << 16, 0).decode("utf-8", "replace").strip()
        return ""

    def end(self) -> None:
        """End the server because nobody wants its workers' kernels any more."""
        self.ended = True
        self.kill()
        self.forget()

    def kill(self) -> None:
        """End the server and with it, through their parent's death signal, its workers."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def forget(self) -> None:
        """Close this process's ends; again is fine, for these are objects and no numbers."""
        self.control.close()
        self.log.close()


def _log_file() -> BinaryIO:
    """For what a server prints: a file without a name, or nothing where none can be made."""
    try:
        return tempfile.TemporaryFile(buffering=0)
    except OSError:
        return open(os.devnull, "r+b", buffering=0)


_state = threading.Lock()
_servers: dict[tuple[tuple[tuple[str, str], ...], str], _Server] = {}


def run_in_fork(
    folder: str, environment: Mapping[str, str], *, needs_torch: bool, needs_cutlass: bool, timeout: float
) -> int | None:
    """Have a worker, a fork of this process's server for that set-up, do the request in `folder`.

    Returns its wait status, or None when it was ended at `timeout` seconds. A server that died is replaced once.

    Raises:
        CompileError: the servers die, or were ended by `end_servers`.
    """
    paths = [os.path.abspath(p or ".") for p in sys.path]
    config = json.dumps({"sys_path": paths, "needs_torch": needs_torch, "needs_cutlass": needs_cutlass})
    words = ""
    for _ in range(2):
        server = _server(environment, config)
        try:
            return server.run(folder, timeout)
        except ServerGone as gone:
            if server.ended:
                raise CompileEnded("the compile was ended") from None
            words = str(gone)
            _drop(server)
            _clear(folder)
    raise CompileError(f"the compile server died twice{f': {words.splitlines()[-1]}' if words else ''}", words)


def end_servers() -> None:
    """End all servers of this process and their workers at once. What waits for one raises `CompileError`."""
    with _state:
        servers = list(_servers.values())
        _servers.clear()
    for server in servers:
        server.end()


def _server(environment: Mapping[str, str], config: str) -> _Server:
    key = (tuple(sorted(environment.items())), config)
    with _state:
        server = _servers.get(key)
        if server is None or server.process.poll() is not None:  # it ends itself when it is idle
            if server is not None:
                server.forget()
            server = _servers[key] = _Server(environment, config)
        return server


def _clear(folder: str) -> None:
    """Started again from scratch: the first worker may have left something, and what it started may still clean up."""
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            if name not in ("request.json", "log"):
                path = os.path.join(folder, name)
                shutil.rmtree(path, ignore_errors=True)
                with contextlib.suppress(OSError):
                    os.unlink(path)


def _drop(server: _Server) -> None:
    with _state:
        for key in [k for k, s in _servers.items() if s is server]:
            del _servers[key]
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.process.wait(_GRACE)
    server.kill()
    server.forget()


def _after_fork_in_child() -> None:
    global _state
    _state = threading.Lock()
    for server in _servers.values():
        server.forget()
    _servers.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
