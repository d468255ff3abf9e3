import os
import signal
import socket
import time

import pytest
from support.entries import key
from support.process import run, start

from muse_jit.store.layout import Layout
from muse_jit.store.lock import Failure, LockTimeout, hold

HOLDER = """
import sys, time
from muse_jit.store.layout import Layout
from muse_jit.store.lock import hold
from support.entries import key
layout = Layout({root!r})
layout.create()
with hold(layout, key().digest, "compiling toy", 60.0):
    print("held", flush=True)
    time.sleep(120)
"""


@pytest.fixture
def layout(tmp_path):
    layout = Layout(str(tmp_path / "cache"))
    layout.create()
    return layout


@pytest.fixture
def holder(layout):
    process = start(HOLDER.format(root=layout.root))
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


@pytest.mark.processes
def test_a_killed_holder_delays_nobody_and_its_file_stays(layout, holder):
    waits = []
    holder.kill()
    holder.wait()
    started = time.monotonic()
    with hold(layout, key().digest, "test", 60.0, waits.append):
        assert time.monotonic() - started < 5.0
    assert os.path.exists(layout.lock(key().digest))
    assert waits == []


@pytest.mark.processes
def test_a_waiter_is_told_once_whom_it_waits_for(layout, holder):
    waits = []
    with hold(layout, key().digest, "test", 0.2, waits.append):
        pass
    assert len(waits) == 1
    assert f"process {holder.pid} on " in waits[0]
    assert "(compiling toy)" in waits[0]


@pytest.mark.processes
def test_one_waiter_takes_over_from_a_stopped_holder(layout, holder):
    os.kill(holder.pid, signal.SIGSTOP)
    started = time.monotonic()
    with hold(layout, key().digest, "test", 0.3):
        waited = time.monotonic() - started
        assert waited >= 0.3
        with (
            pytest.raises(LockTimeout, match=r"takeover\.lock is held by process") as caught,
            hold(layout, key().digest, "another", 0.2),
        ):
            raise AssertionError("two took over")
        assert str(os.getpid()) in caught.value.holder


@pytest.mark.processes
def test_another_key_is_not_held_up(layout, holder):
    with hold(layout, key(2).digest, "test", 0.1):
        pass


@pytest.mark.processes
def test_a_forked_child_does_not_release_the_lock(layout):
    with hold(layout, key().digest, "parent", 60.0):
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        out = run(
            "from muse_jit.store.layout import Layout\nfrom muse_jit.store.lock import hold, LockTimeout\n"
            "from support.entries import key\n"
            "import os\n"
            f"layout = Layout({layout.root!r})\n"
            "from muse_jit.store.lock import _acquire\n"
            "print(_acquire(layout, layout.lock(key().digest), 'x', 0.0))"
        )
        assert out.strip() == "None"


def test_a_file_system_without_flock_gets_the_strict_soft_lock(layout, monkeypatch):
    import errno

    import filelock

    from muse_jit.store import lock as lock_module

    class NoLocks(filelock.FileLock):
        def acquire(self, *arguments, **named):
            raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(lock_module, "FileLock", NoLocks)
    with (
        hold(layout, key().digest, "one", 60.0),
        pytest.raises(LockTimeout),
        hold(layout, key().digest, "two", 0.1),
        hold(layout, key().digest, "three", 0.1),
    ):
        raise AssertionError("three holders")
    with hold(layout, key().digest, "again", 0.1):
        pass


def test_another_error_is_raised_and_not_taken_for_a_held_lock(layout, monkeypatch):
    import errno

    import filelock

    from muse_jit.store import lock as lock_module

    class Full(filelock.FileLock):
        def acquire(self, *arguments, **named):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(lock_module, "FileLock", Full)
    with pytest.raises(OSError, match="No space left"), hold(layout, key().digest, "one", 60.0):
        pass


def test_a_failure_from_before_a_reboot_answers_nobody():
    """The clock begins anew then: an old failure lies ahead of every request."""
    now = time.monotonic()
    host = socket.gethostname()
    assert Failure("m", "", now, host).answers(now - 1.0)
    assert not Failure("m", "", now - 2.0, host).answers(now - 1.0)
    assert not Failure("m", "", now + 30 * 86400.0, host).answers(now)
    assert not Failure("m", "", now, "elsewhere").answers(now - 1.0)
