"""Waiting for a lock: whom it delays, for how long, at what cost, and what is said. Names carry the reports' ids."""

import json
import logging
import os
import pathlib
import signal
import socket
import threading
import time

import pytest
from field.barrier import NO_COMPILER, SERVICE, homes, together, values
from support import toy
from support.entries import key
from support.process import run, start

from muse_jit.service import JitService
from muse_jit.settings import Settings
from muse_jit.store.layout import Layout
from muse_jit.store.lock import LockTimeout, hold
from muse_jit.store.lookup import Hit

pytestmark = pytest.mark.processes

HOLDER = """
from muse_jit.store.layout import Layout
from muse_jit.store.lock import hold
from support.entries import key
import time
layout = Layout({root!r}, {share!r})
layout.create()
with hold(layout, {digest!r}, "compiling toy", 60.0):
    print("held", flush=True)
    time.sleep(120)
"""


@pytest.fixture
def layout(tmp_path):
    layout = Layout(str(tmp_path / "cache"))
    layout.create()
    return layout


@pytest.fixture
def held():
    """Start processes that hold a lock; they are ended with the test."""
    processes = []

    def start_holder(layout, digest):
        process = start(HOLDER.format(root=layout.root, share=layout.share, digest=digest))
        processes.append(process)
        assert process.stdout.readline() == "held\n"
        return process

    yield start_holder
    for process in processes:
        process.kill()
        process.communicate()


def _leave(layout, kind, **changes):
    """A lock file with a record, as somebody who died left it."""
    record = {"pid": 1, "start_time": 5, "host": socket.gethostname(), "what": "compiling", "since": 0.0, **changes}
    path = pathlib.Path(layout.lock(key().digest, kind))
    layout.make_parents(str(path))
    path.write_text(json.dumps(record))
    return path


@pytest.mark.parametrize("pid", ["dead", "living"])
def test_b1_b3_a_leftover_lock_file_delays_nobody_whatever_process_it_names(layout, pid):
    """Also where the id of the dead holder belongs to somebody who lives, as with shared process ids of containers."""
    number = os.getpid() if pid == "living" else 2**22 - 3
    paths = [_leave(layout, kind, pid=number) for kind in ("lock", "takeover.lock")]
    waits = []
    started = time.monotonic()
    with hold(layout, key().digest, "test", 60.0, waits.append):
        assert time.monotonic() - started < 10.0
        assert json.loads(paths[0].read_text())["what"] == "test"
    assert waits == []


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 3}', '{"since": 1e400}', "\0" * 5000])
def test_b1_b9_a_record_that_cannot_be_understood_changes_nothing(layout, held, text):
    with hold(layout, key().digest, "before", 60.0):
        pathlib.Path(layout.lock(key().digest)).write_text(text)
        said = []
        with hold(layout, key().digest, "taking over", 0.1, said.append):
            assert len(said) == 1
    with hold(layout, key().digest, "after", 60.0):
        pass


def test_b2_importing_takes_no_lock_and_starts_nothing():
    out = run(
        "import sys, os\n"
        "sys.addaudithook(lambda event, args: print(event, args) if event in "
        "('subprocess.Popen', 'fcntl.flock', 'fcntl.lockf', 'os.fork', 'os.mkdir') else None)\n"
        "import muse_jit\nfrom muse_jit import service, settings\nfrom muse_jit.service import JitService\n"
        "print([m for m in ('filelock', 'cutlass', 'torch', 'tvm_ffi') if m in sys.modules])"
    )
    assert out.strip() == "[]"


def test_b2_b9_a_waiter_says_once_whom_it_waits_for(settings, tmp_path, held, caplog):
    service = JitService("sm_90a", settings.with_options(stall_limit=0.3))
    constants = toy.ToyConstants(value=3, count_file=str(tmp_path / "count"))
    holder = held(service.layout, service.key_of(constants)[1].digest)
    with caplog.at_level(logging.INFO, "muse_jit"):
        assert service.get(constants)() == 3
    waiting = [r.getMessage() for r in caplog.records if "waiting" in r.getMessage()]
    assert len(waiting) == 1
    assert f"process {holder.pid} on {socket.gethostname()} since " in waiting[0]
    assert service.counters.waited == 1


@pytest.mark.parametrize(("share", "mode"), [("owner", 0o600), ("group", 0o640), ("all", 0o644)])
def test_b3_lock_files_have_the_mode_of_the_share_whatever_the_umask(tmp_path, share, mode):
    layout = Layout(str(tmp_path / "cache"), share)
    layout.create()
    before = os.umask(0o077)
    try:
        with hold(layout, key().digest, "test", 60.0), hold(layout, key().digest, "test", 0.1):
            paths = [layout.lock(key().digest, kind) for kind in ("lock", "takeover.lock")]
            assert [os.stat(p).st_mode & 0o777 for p in paths] == [mode, mode]
    finally:
        os.umask(before)


WAITER = """
import resource, time
from muse_jit.store.layout import Layout
from muse_jit.store.lock import LockTimeout, hold
layout = Layout({root!r})
with hold(layout, {other!r}, "warm", 1.0): pass  # imports and first files are not the waiting
before, started = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
try:
    with hold(layout, {digest!r}, "waiter", 1.5): print("got it")
except LockTimeout as error:
    after, seconds = resource.getrusage(resource.RUSAGE_SELF), time.monotonic() - started
    print(seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
"""


def test_b4_a_waiter_sleeps_and_its_deadline_works(layout, held):
    """Both locks are held by processes that stopped: nothing is left but to wait twice and give up."""
    digest = key().digest
    first = held(layout, digest)
    os.kill(first.pid, signal.SIGSTOP)
    takeover = start(
        f"from muse_jit.store.layout import Layout\nfrom muse_jit.store.lock import hold\nimport time\n"
        f"with hold(Layout({layout.root!r}), {digest!r}, 'takeover', 0.1): print('held', flush=True); time.sleep(120)"
    )
    try:
        assert takeover.stdout.readline() == "held\n"
        os.kill(takeover.pid, signal.SIGSTOP)
        out = run(WAITER.format(root=layout.root, digest=digest, other=key(2).digest))
        seconds, cpu = map(float, out.split())
        assert 3.0 <= seconds < 20.0
        assert cpu < 0.1 * seconds
    finally:
        takeover.kill()
        takeover.communicate()


def test_b5_the_default_limit_of_a_waiter_is_longer_than_any_compile_may_take():
    assert Settings().patience > Settings().compile_timeout


def test_b5_a_raised_compile_timeout_raises_the_limit_of_a_waiter():
    """Otherwise a healthy compile that is allowed to take long is compiled a second time."""
    settings = Settings.from_environ({"MUSE_JIT_COMPILE_TIMEOUT": "3600"})
    assert settings.patience > settings.compile_timeout


def test_b6_a_lock_file_is_never_unlinked_and_a_warm_hit_opens_none(settings, tmp_path, monkeypatch):
    service = JitService("sm_90a", settings)
    constants = toy.ToyConstants(value=3, count_file=str(tmp_path / "count"))
    path = service.layout.lock(service.key_of(constants)[1].digest)
    service.obtain(constants)
    inode = os.stat(path).st_ino
    service.obtain(constants, force=True)
    assert os.stat(path).st_ino == inode
    opened = []
    real = os.open
    monkeypatch.setattr(os, "open", lambda p, *rest, **named: opened.append(str(p)) or real(p, *rest, **named))
    assert JitService("sm_90a", settings).get(constants)() == 3
    assert [p for p in opened if "locks-v1" in p or p.endswith(".lock")] == []


def test_b6_a_deleted_lock_folder_is_made_again(settings, tmp_path):
    import shutil

    service = JitService("sm_90a", settings)
    service.obtain(toy.ToyConstants(value=3))
    shutil.rmtree(os.path.join(service.layout.root, "locks-v1"))
    assert service.get(toy.ToyConstants(value=4))() == 4
    assert isinstance(service.find(toy.ToyConstants(value=4)), Hit)


HOLD_AND_FORK = """
import signal
s = service()
c = toy.ToyConstants(value=3, count_file={count!r}, seconds=60.0)
threading.Thread(target=s.obtain, args=(c,), daemon=True).start()
while not pathlib.Path({count!r}).exists(): time.sleep(0.01)
child = os.fork()
if child == 0:
    {child}
print(child, flush=True)
time.sleep(120)
"""


@pytest.mark.parametrize("end", ["os._exit(0)", "sys.exit(0)"])
def test_b7_a_child_forked_during_a_compile_does_not_free_the_lock(settings, tmp_path, end):
    count = tmp_path / "count"
    code = SERVICE + HOLD_AND_FORK.format(count=str(count), child=end)
    process = start(code, block=NO_COMPILER, **homes(settings))
    try:
        child = int(process.stdout.readline())
        deadline = time.monotonic() + 30
        while pathlib.Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            assert time.monotonic() < deadline
            time.sleep(0.01)
        service = JitService("sm_90a", settings.with_options(stall_limit=0.2))
        constants = toy.ToyConstants(value=3, count_file=str(count), seconds=60.0)
        said = []
        with hold(service.layout, service.key_of(constants)[1].digest, "test", 0.2, said.append):
            pass
        assert len(said) == 1
        assert f"process {process.pid} " in said[0]
    finally:
        process.kill()
        process.communicate()


def test_b7_b1_a_forked_child_that_lives_on_does_not_keep_the_lock_of_its_killed_parent(settings, tmp_path):
    count = tmp_path / "count"
    code = SERVICE + HOLD_AND_FORK.format(count=str(count), child="time.sleep(120); os._exit(0)")
    process = start(code, block=NO_COMPILER, **homes(settings))
    child = int(process.stdout.readline())
    try:
        process.kill()
        process.wait()
        service = JitService("sm_90a", settings)
        constants = toy.ToyConstants(value=3, count_file=str(count), seconds=60.0)
        started = time.monotonic()
        with hold(service.layout, service.key_of(constants)[1].digest, "test", 60.0):
            assert time.monotonic() - started < 10.0
    finally:
        os.kill(child, signal.SIGKILL)
        process.stdout.close()
        process.stderr.close()


def test_b9_where_every_holder_stopped_a_request_ends_with_its_kernel_and_a_named_lock(
    settings, tmp_path, held, caplog
):
    service = JitService("sm_90a", settings.with_options(stall_limit=0.3))
    constants = toy.ToyConstants(value=3, count_file=str(tmp_path / "count"))
    digest = service.key_of(constants)[1].digest
    first = held(service.layout, digest)
    os.kill(first.pid, signal.SIGSTOP)
    done = threading.Event()

    def take_over():
        with hold(service.layout, digest, "taking over", 0.1):
            done.wait(60)

    thread = threading.Thread(target=take_over)
    thread.start()
    try:
        with caplog.at_level(logging.WARNING, "muse_jit"):
            assert service.get(constants)() == 3
    finally:
        done.set()
        thread.join()
    assert len(caplog.records) == 1
    text = caplog.records[0].getMessage()
    assert service.layout.lock(digest, "takeover.lock") in text
    assert f"is held by process {os.getpid()} on " in text
    assert "compiling without it" in text
    assert isinstance(service.find(constants), Hit)


def test_b9_the_error_of_a_lock_names_it_and_its_holder(layout, held):
    holder = held(layout, key().digest)
    with (
        hold(layout, key().digest, "taking over", 0.1),
        pytest.raises(LockTimeout) as caught,
        hold(layout, key().digest, "third", 0.1),
    ):
        raise AssertionError("three holders")
    assert caught.value.path == layout.lock(key().digest, "takeover.lock")
    assert f"process {os.getpid()} on " in str(caught.value)
    assert holder.poll() is None


def test_b1_b9_one_of_many_waiters_takes_over_and_the_others_wait_for_that_one(settings, tmp_path):
    """The builder stops in the middle of its compile: two compiles in all, whoever else waits."""
    count = tmp_path / "count"
    constants = toy.ToyConstants(value=3, count_file=str(count), seconds=1.0)
    code = f"service().obtain(toy.ToyConstants(**{constants.as_dict()!r}))\nprint('resumed')"
    variables = {**homes(settings), "MUSE_JIT_WORKERS": 4}
    builder = start(SERVICE + code, block=NO_COMPILER, **variables)
    try:
        deadline = time.monotonic() + 60
        while not count.exists() and time.monotonic() < deadline:
            time.sleep(0.005)
        os.kill(builder.pid, signal.SIGSTOP)
        waiter = f"s = service()\nreach()\nprint(s.get(toy.ToyConstants(**{constants.as_dict()!r}))())"
        # Longer than the compile of the one that takes over, so that the others see it end.
        ended = together(tmp_path, [waiter] * 4, MUSE_JIT_STALL_LIMIT=4.0, **variables)
        assert values(ended) == ["3"] * 4
        assert toy.compiles(count) == 2
        os.kill(builder.pid, signal.SIGCONT)
        out, err = builder.communicate(timeout=60)
        assert out.strip() == "resumed", err
    finally:
        builder.kill()
        builder.communicate()
    assert toy.compiles(count) == 2
    assert isinstance(JitService("sm_90a", settings).find(constants), Hit)


def test_b1_b9_where_there_is_no_flock_a_dead_holder_delays_by_the_stall_limit_and_not_longer(layout):
    """The fail-closed lock of claims cannot tell a dead holder on another host; the documented limit bounds it."""
    code = (
        "import errno, os, time, filelock\nfrom muse_jit.store import lock\n"
        "from muse_jit.store.layout import Layout\nfrom support.entries import key\n"
        "class NoLocks(filelock.FileLock):\n"
        "    def acquire(self, *arguments, **named): raise OSError(errno.ENOLCK, 'No locks available')\n"
        "lock.FileLock = NoLocks\n"
        f"layout = Layout({layout.root!r})\n"
    )
    killed = start(code + "with lock.hold(layout, key().digest, 'a', 9.0): os.kill(os.getpid(), 9)")
    killed.communicate(timeout=60)
    assert killed.returncode == -signal.SIGKILL
    out = run(
        code + "started = time.monotonic()\n"
        "with lock.hold(layout, key().digest, 'b', 1.0): print(time.monotonic() - started)"
    )
    assert 1.0 <= float(out) < 10.0


def test_b10_no_file_of_the_cache_is_mapped(settings, tmp_path):
    service = JitService("sm_90a", settings)
    constants = toy.ToyConstants(value=3)
    assert service.get(constants)() == 3
    again = JitService("sm_90a", settings)
    assert again.get(constants)() == 3
    assert again.counters.disk_hits == 1
    maps = pathlib.Path("/proc/self/maps").read_text()
    assert "memfd:toy-" in maps
    assert settings.cache_dir not in maps


def test_b4_many_waiters_cost_little(settings, tmp_path):
    """Eight processes wait for one compile of three seconds; what they burn meanwhile is theirs alone."""
    count = tmp_path / "count"
    code = (
        "import resource\ns = service()\nimport filelock, muse_jit.loader.kernel, muse_jit.store.publish\nreach()\n"
        f"c = toy.ToyConstants(value=3, count_file={str(count)!r}, seconds=3.0)\n"
        "before = resource.getrusage(resource.RUSAGE_SELF)\ns.obtain(c)\n"
        "after = resource.getrusage(resource.RUSAGE_SELF)\n"
        "print(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)"
    )
    outputs = values(together(tmp_path, [code] * 8, **homes(settings)))
    assert toy.compiles(count) == 1
    assert sum(map(float, outputs)) < 0.1 * 3.0 * 8
