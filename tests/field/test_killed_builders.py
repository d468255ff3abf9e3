"""A builder is killed or stopped at every step of compiling and publishing: what it leaves, whom it delays."""

import errno
import os
import pathlib
import signal
import statistics
import time

import pytest
from field.barrier import NO_COMPILER, SERVICE, homes
from field.syscalls import VALUE, drive
from support import toy
from support.process import alive, start

from muse_jit.errors import CompileError
from muse_jit.service import JitService
from muse_jit.store.lookup import Hit, Miss, Reason

pytestmark = pytest.mark.processes

PUBLISH_STEPS = {
    "mkdir staging-v1/*",
    "open staging-v1/*/kernel.so",
    "fchmod staging-v1/*/kernel.so",
    "write staging-v1/*/kernel.so",
    "fsync staging-v1/*/kernel.so",
    "open staging-v1/*/entry.json",
    "fchmod staging-v1/*/entry.json",
    "write staging-v1/*/entry.json",
    "fsync staging-v1/*/entry.json",
    "fsync staging-v1/*",
    "mkdir entries-v1/*",
    "chmod entries-v1/*",
    "rename staging-v1/*",
    "fsync entries-v1/*",
}
GET_STEPS = PUBLISH_STEPS | {
    "mkdir locks-v1/*",
    "open locks-v1/*/*.lock",
    "flock locks-v1/*/*.lock",
    "pwrite locks-v1/*/*.lock",
}
COMPILE_STEPS = {"mkdir muse_jit-*", "open request.json", "_execute_child", "unlink request.json", "rmdir muse_jit-*"}


def _covered(trials, steps, ending):
    """All of `steps` were hit, and the last trial ran to its end untouched."""
    assert trials[-1].ending == "untouched"
    assert trials[-1].resumed == VALUE
    assert {t.ending for t in trials[:-1]} == {ending}
    assert steps <= {t.label for t in trials}, steps - {t.label for t in trials}


def _step_of_the_entry(trials):
    """The step with which the entry appears: the rename before its shard is flushed. README and others came before."""
    flushed = next(t.step for t in trials if t.label == "fsync entries-v1/*")
    return max(t.step for t in trials if t.label == "rename staging-v1/*" and t.step < flushed)


def _nothing_half(trials):
    assert [(t.label, t.half_entries) for t in trials if t.half_entries] == []
    assert {t.found for t in trials} == {"hit"}
    assert {t.second for t in trials} == {VALUE}
    assert max(t.staging for t in trials) <= 1


@pytest.mark.parametrize("side", ["before", "after"])
def test_c7_a12_publish_killed_at_any_step_leaves_a_whole_entry_or_none(tmp_path, side):
    trials = drive(tmp_path, "publish", side, signal.SIGKILL)
    _covered(trials, PUBLISH_STEPS, "SIGKILL")
    _nothing_half(trials)
    # The entry appears with the rename, and not a step before: from then on nobody compiles.
    renamed = _step_of_the_entry(trials) + (side == "before")
    assert [t.compiles for t in trials] == [1] * renamed + [0] * (len(trials) - renamed)


@pytest.mark.parametrize(("side", "real"), [("before", True), ("after", False)])
def test_c7_g8_b1_l8_get_killed_at_any_step_delays_nobody_and_leaves_no_process(tmp_path, side, real):
    """`real`: with the worker and the linker; otherwise what the compiler would make comes from memory."""
    trials = drive(tmp_path, "get", side, signal.SIGKILL, real=real)
    _covered(trials, GET_STEPS | (COMPILE_STEPS if real else set()), "SIGKILL")
    _nothing_half(trials)
    assert [t for t in trials if t.orphans] == []
    waits = [t.lock_seconds for t in trials]
    assert statistics.median(waits) < 1.0
    assert max(waits) < 10.0, [t for t in trials if t.lock_seconds >= 10.0]
    # At most one more compile than without the kill, and none once the entry is there.
    renamed = _step_of_the_entry(trials) + (side == "before")
    assert max(t.compiles for t in trials[:renamed]) == 2
    assert {t.compiles for t in trials[renamed:]} == {1}


def test_b1_a16_a_builder_stopped_at_any_step_is_passed_by_and_ends_well_when_it_goes_on(tmp_path):
    trials = drive(tmp_path, "get", "before", signal.SIGSTOP, stall_limit=0.3)
    _covered(trials, GET_STEPS, "SIGSTOP")
    _nothing_half(trials)
    stopped = trials[:-1]
    assert {t.third for t in stopped} == {VALUE}
    assert {t.resumed for t in stopped} == {VALUE}
    assert max(t.compiles for t in stopped) == 2
    assert max(t.lock_seconds for t in stopped) >= 0.3
    assert max(t.lock_seconds for t in stopped) < 10.0


def test_c7_a_killed_builder_leaves_litter_only_below_staging(tmp_path):
    trials = drive(tmp_path, "publish", "before", signal.SIGKILL)
    assert sorted({name for t in trials for name in t.litter}) == []


def test_c7_a2_o5_one_failed_call_anywhere_costs_at_most_a_compile_and_never_the_kernel(tmp_path):
    """The disk is full at one step: of locking, publishing, unlocking or loading, in turn."""
    trials = drive(tmp_path, "get", "before", -errno.ENOSPC)
    _covered(trials, GET_STEPS, "failed call")
    _nothing_half(trials)
    # The memory file that a library is loaded from is memory: without it there is no kernel.
    failed = [t for t in trials if not t.label.startswith("open memfd:")]
    assert [t.label for t in failed if t.resumed != VALUE] == []
    assert [t.label for t in failed if t.litter or t.staging] == []
    assert max(t.compiles for t in failed) <= 2


@pytest.mark.parametrize(
    ("behaviour", "ending"),
    [
        ("killed_once", "killed by SIGKILL"),
        ("killed_in_export_once", "killed by SIGKILL"),
        ("killed_at_result_once", "killed by SIGKILL"),
        ("crash_once", "killed by SIGABRT"),
        ("silent_once", "exit code 0"),
    ],
)
def test_l7_c7_the_death_of_a_worker_is_an_error_at_once_and_no_entry(settings, tmp_path, behaviour, ending):
    count = tmp_path / "count"
    constants = toy.ToyConstants(value=3, count_file=str(count), behaviour=behaviour)
    service = JitService("sm_90a", settings)
    started = time.monotonic()
    with pytest.raises(CompileError, match=ending):
        service.get(constants)
    assert time.monotonic() - started < 30
    assert service.find(constants) == Miss(Reason.ABSENT)
    assert not alive(int(count.read_text().split()[0]))
    assert service.get(constants)() == 3
    assert toy.compiles(count) == 2


def test_b9_l7_a_worker_that_stopped_is_ended_at_the_compile_timeout(settings, tmp_path):
    count = tmp_path / "count"
    constants = toy.ToyConstants(value=3, count_file=str(count), behaviour="stopped_once")
    service = JitService("sm_90a", settings.with_options(compile_timeout=2.0))
    with pytest.raises(CompileError, match=r"did not finish within 2 s \(MUSE_JIT_COMPILE_TIMEOUT\)"):
        service.get(constants)
    assert not alive(int(count.read_text().split()[0]))
    patient = JitService("sm_90a", settings)
    assert patient.get(constants)() == 3
    assert toy.compiles(count) == 2


def _gone(pid, seconds=5.0):
    deadline = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not alive(pid)


def _child_of(constants):
    path = pathlib.Path(constants.count_file + ".child")
    deadline = time.monotonic() + 60
    while (not path.exists() or not path.read_text().endswith("\n")) and time.monotonic() < deadline:
        time.sleep(0.01)
    return int(path.read_text())


@pytest.mark.parametrize("timeout", [60.0, 2.0])
def test_l8_what_a_compile_started_ends_with_it(settings, tmp_path, timeout):
    """Also where the compile itself does not end and is ended."""
    seconds = 0.0 if timeout > 10 else 60.0
    constants = toy.ToyConstants(count_file=str(tmp_path / "count"), behaviour="child", seconds=seconds)
    service = JitService("sm_90a", settings.with_options(compile_timeout=timeout))
    if seconds:
        with pytest.raises(CompileError, match="did not finish"):
            service.obtain(constants)
    else:
        assert isinstance(service.obtain(constants).hit, Hit)
    child = _child_of(constants)
    try:
        assert _gone(child)
    finally:
        if alive(child):
            os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_l8_nothing_a_compile_started_outlives_the_death_of_its_parent(settings, tmp_path, number):
    constants = toy.ToyConstants(count_file=str(tmp_path / "count"), behaviour="child", seconds=60.0)
    # A shell's background job, which these tests may run in, begins with Ctrl-C ignored.
    code = SERVICE + "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += f"service().obtain(toy.ToyConstants(**{constants.as_dict()!r}))"
    process = start(code, block=NO_COMPILER, **homes(settings))
    child = _child_of(constants)
    try:
        os.kill(process.pid, number)
        process.communicate(timeout=30)
        worker = int(pathlib.Path(constants.count_file).read_text().split()[0])
        assert _gone(worker)
        assert _gone(child)
    finally:
        process.kill()
        process.communicate()
        if alive(child):
            os.kill(child, signal.SIGKILL)


def _linker(tmp_path, text):
    """A linker that says its process id and then does `text`."""
    script = tmp_path / "slow_linker"
    script.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/linker\n{text}\n")
    script.chmod(0o755)
    return script


def test_l8_a_linker_does_not_outlive_the_death_of_its_parent(settings, tmp_path):
    script = _linker(tmp_path, "exec sleep 600")
    code = SERVICE + "service().obtain(toy.ToyConstants(value=1))"
    process = start(code, block=NO_COMPILER, CC=script, **homes(settings))
    deadline = time.monotonic() + 60
    while not (tmp_path / "linker").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.kill()
    process.communicate()
    pid = int((tmp_path / "linker").read_text())
    try:
        assert _gone(pid)
    finally:
        if alive(pid):
            os.kill(pid, signal.SIGKILL)


def test_l7_b9_a_linker_that_hangs_is_ended_with_what_it_started(settings, tmp_path):
    """Also where a process that it started holds on to its output."""
    script = _linker(tmp_path, f"sleep 30 &\necho $! > {tmp_path}/child\nwait")
    service = JitService("sm_90a", settings.with_options(cc=str(script), compile_timeout=3.0))
    started = time.monotonic()
    with pytest.raises(CompileError, match="did not finish within 3 s"):
        service.obtain(toy.ToyConstants(value=1))
    assert time.monotonic() - started < 15
    child = int((tmp_path / "child").read_text())
    try:
        assert _gone(child)
    finally:
        if alive(child):
            os.kill(child, signal.SIGKILL)
