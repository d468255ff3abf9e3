"""Start N processes that all stand at one barrier, and let them go at once."""

import dataclasses
import os
import pathlib
import secrets
import time

from support.process import start

_ENVIRONMENT = "FIELD_BARRIER"
SERVICE = """
import logging, os, pathlib, sys, threading, time
import muse_jit
from muse_jit.settings import Settings
from support import toy
from field.barrier import reach

def service(**options):
    return muse_jit.JitService("sm_90a", Settings.from_environ().with_options(**options))
"""
"""The beginning of a process that asks a service for toys; its settings come from the environment."""
NO_COMPILER = ("cutlass", "torch")
"""Not to be imported by such a process: the compiler must not be, and tvm_ffi would import torch for 1.3 s."""


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a process ended."""

    pid: int
    code: int
    out: str
    err: str
    seconds: float
    """From the opening of the barrier until its end was seen."""


def homes(settings):
    """Variables of a process that uses a test's cache and, when killed, leaves litter below the test's folder only."""
    return {"MUSE_JIT_CACHE_DIR": settings.cache_dir, "TMPDIR": os.path.dirname(settings.cache_dir)}


def reach():
    """Called by a process of `together`: say that it is ready, then sleep until the barrier opens."""
    folder = pathlib.Path(os.environ[_ENVIRONMENT])
    (folder / f"ready-{secrets.token_hex(8)}").touch()
    while not (folder / "open").exists():
        time.sleep(0.002)


def together(folder, codes, *, block=NO_COMPILER, timeout=60.0, **variables):
    """Run all of `codes`, each of which calls `reach()`, and return how each ended. None outlives the call."""
    folder = pathlib.Path(folder) / f"barrier-{secrets.token_hex(4)}"
    folder.mkdir(parents=True)
    variables = {"TMPDIR": folder, **variables, _ENVIRONMENT: folder}
    processes = [start(SERVICE + code, block=block, **variables) for code in codes]
    try:
        deadline = time.monotonic() + timeout
        while len(list(folder.glob("ready-*"))) < len(processes) and time.monotonic() < deadline:
            assert all(p.poll() is None for p in processes), [p.communicate() for p in processes if p.poll()]
            time.sleep(0.005)
        (folder / "open").touch()
        opened = time.monotonic()
        ended = []
        for process in processes:
            out, err = process.communicate(timeout=timeout)
            ended.append(Ended(process.pid, process.returncode, out.strip(), err, time.monotonic() - opened))
        return ended
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.communicate()


def values(ended):
    """The outputs of processes that all ended well."""
    assert [e.code for e in ended] == [0] * len(ended), [e.err for e in ended]
    return [e.out for e in ended]
