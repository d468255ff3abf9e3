"""One place for each compile worker that may run on this host, shared by all processes that use a cache folder.

N ranks that start at once would otherwise start N times as many compilers as there are CPUs. A place is a lock file
that is free again when its holder dies.
"""

import os
import re
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from muse_jit.store.layout import Layout
from muse_jit.store.lock import POLL_SECONDS, try_lock


def private_layout() -> Layout:
    """Where the places are kept when the cache cannot keep them: it is off, read-only, or has no locks."""
    return Layout(os.path.join(tempfile.gettempdir(), f"muse_jit-places-{os.getuid()}"))


@contextmanager
def worker_slot(layout: Layout, limit: int, patience: float, *, only_first: bool = False) -> Iterator[bool]:
    """Wait for one of `limit` places on this host and hold it; yields whether one was got within `patience` seconds.

    `only_first` asks for the first place alone: who has it may take the others before somebody else does.

    Without one the caller compiles all the same: a holder that stopped must not stop everybody.

    Raises:
        OSError: the lock files cannot be made.
    """
    host = re.sub(r"[^A-Za-z0-9_.-]", "_", socket.gethostname())[:64]
    deadline = time.monotonic() + patience
    with ExitStack() as stack:
        got = False
        while not got:
            for number in range(1 if only_first else limit):
                path = os.path.join(layout.locks, f"workers-{host}", f"{number}.lock")
                got = stack.enter_context(try_lock(layout, path, "compiling")) is not None
                if got:
                    break
            else:
                if time.monotonic() >= deadline:
                    break
                stack.close()
                time.sleep(POLL_SECONDS)
        yield got
