"""`JitService.ensure`: N processes that want the same kernels split the compiling and all load all."""

import json
import logging
import os
import signal
import socket
import threading
import time

import pytest
from field.barrier import SERVICE, homes, together, values
from support import toy
from support.process import alive, start

from muse_jit.errors import ConstantsError, MissForbidden
from muse_jit.service import JitService
from muse_jit.settings import Settings
from muse_jit.spans import STAGES
from muse_jit.store.layout import Layout

pytestmark = pytest.mark.processes

ENSURE = """
reach()
s = service({options})
wanted = [toy.ToyConstants(value=v, count_file={count!r}, seconds={seconds}) for v in {values}]
report = s.ensure(wanted)
import json
print(json.dumps({{"report": report.as_dict(), "values": [s.get(c)() for c in wanted], "waited": s.counters.waited,
                   "memory": s.counters.memory_hits}}))
"""


def _service(settings, **options):
    return JitService("sm_90a", settings.with_options(**options))


def _toys(tmp_path, numbers, **more):
    return [toy.ToyConstants(value=n, count_file=str(tmp_path / "count"), **more) for n in numbers]


def _code(tmp_path, *, numbers=range(6), seconds=0.0, options=""):
    return ENSURE.format(count=str(tmp_path / "count"), values=list(numbers), seconds=seconds, options=options)


def _most_at_once(spans):
    events = sorted([(begin, 1) for begin, _, _ in spans] + [(end, -1) for _, end, _ in spans])
    now = most = 0
    for _, change in events:
        now += change
        most = max(most, now)
    return most


def test_one_process_compiles_loads_and_reports(settings, tmp_path, caplog):
    wanted = _toys(tmp_path, range(3))
    with caplog.at_level(logging.INFO, "muse_jit"):
        report = _service(settings).ensure([*wanted, wanted[0]])
    assert (report.hits, report.compiled, report.failed, report.complete) == (0, 3, 0, True)
    assert report.misses == {"absent": 3}
    for kernel in report.kernels:
        assert kernel.status == "compiled"
        assert [s.stage for s in kernel.spans if s.stage in ("look-up", "compile", "link", "publish", "load")] == [
            "look-up", "compile", "link", "publish", "load",
        ]  # fmt: skip
    (line,) = [r.getMessage() for r in caplog.records if r.levelno == logging.INFO]
    assert line.startswith("muse_jit for sm_90a: 3 kernels: 0 hits, 3 compiled, misses: 3 absent; ")
    assert settings.cache_dir in line

    caplog.clear()
    again = _service(settings)
    with caplog.at_level(logging.INFO, "muse_jit"):
        report = again.ensure(wanted)
    assert (report.hits, report.compiled, report.misses) == (3, 0, {})
    assert [again.get(c)() for c in wanted] == [0, 1, 2]
    assert again.counters.memory_hits == 3
    assert len([r for r in caplog.records if r.levelno == logging.INFO]) == 1
    assert again.ensure(wanted).hits == 3
    assert toy.compiles(tmp_path / "count") == 3


def test_the_report_says_where_the_time_went(settings, tmp_path):
    report = _service(settings).ensure(_toys(tmp_path, [1, 2], seconds=0.3))
    document = report.as_dict()
    assert document["stages"]["compile"] >= 0.6
    assert set(document["stages"]) == set(STAGES)
    assert all(k["stages"]["compile"] >= 0.3 for k in document["kernels"])
    assert json.loads(json.dumps(document)) == document
    pids = {s.pid for k in report.kernels for s in k.spans if s.stage == "compile"}
    assert len(pids) == 2
    assert os.getpid() not in pids


def test_processes_that_start_at_once_split_the_work_and_all_have_all(settings, tmp_path):
    ended = together(tmp_path, [_code(tmp_path, seconds=0.2)] * 4, MUSE_JIT_WORKERS=2, **homes(settings))
    results = [json.loads(out) for out in values(ended)]
    assert [r["values"] for r in results] == [list(range(6))] * 4
    reports = [r["report"] for r in results]
    assert sum(r["compiled"] for r in reports) == 6 == toy.compiles(tmp_path / "count")
    assert [r["compiled"] + r["hits"] for r in reports] == [6] * 4
    assert 0 < sum(r["waited"] for r in results) <= 18  # a late one may find the first ones there
    assert [r["memory"] for r in results] == [6] * 4
    waits = [k["stages"]["wait"] for r in reports for k in r["kernels"] if k["status"] == "hit"]
    assert max(waits) > 0.2


@pytest.mark.parametrize("limit", [1, 2])
def test_workers_and_compile_servers_are_bounded_over_all_processes(settings, tmp_path, limit):
    codes = [_code(tmp_path, seconds=0.1)] * 5
    values(together(tmp_path, codes, MUSE_JIT_WORKERS=limit, **homes(settings)))
    compiles = toy.times(tmp_path / "count")
    assert len(compiles) == 6
    assert _most_at_once(compiles) <= limit
    assert len({server for _, _, server in compiles}) == 1  # one rank took all places; the others import no compiler


@pytest.mark.parametrize("mode", ["off", "readonly"])
def test_where_the_cache_cannot_keep_count_the_bound_holds_all_the_same(settings, tmp_path, mode):
    codes = [_code(tmp_path, numbers=range(2), seconds=0.2)] * 3
    shared = tmp_path / "tmp"
    shared.mkdir()
    variables = {**homes(settings), "TMPDIR": shared}
    values(together(tmp_path, codes, MUSE_JIT_WORKERS=1, MUSE_JIT_MODE=mode, **variables))
    assert toy.compiles(tmp_path / "count") == 6  # nothing can be shared
    assert _most_at_once(toy.times(tmp_path / "count")) == 1


def test_one_kernel_that_crashes_fails_alone_and_once_for_all_processes(settings, tmp_path):
    code = _code(tmp_path, numbers=range(3)).replace(
        "report = s.ensure(wanted)",
        f"bad = toy.ToyConstants(value=9, count_file={str(tmp_path / 'bad')!r}, behaviour='crash', seconds=1.0)\n"
        "report = s.ensure([bad, *wanted])",
    )
    ended = together(tmp_path, [code] * 3, MUSE_JIT_WORKERS=2, **homes(settings))
    for result in map(json.loads, values(ended)):
        assert result["values"] == [0, 1, 2]
        assert (result["report"]["failed"], result["report"]["compiled"] + result["report"]["hits"]) == (1, 3)
        error = result["report"]["kernels"][0]["error"]
        assert "killed by SIGABRT" in error
        assert os.path.exists(error.partition("full log: ")[2].strip())
    assert toy.compiles(tmp_path / "bad") == 1
    assert toy.compiles(tmp_path / "count") == 3


def test_a_time_limit_holds_for_each_kernel_by_itself(settings, tmp_path):
    wanted = [*_toys(tmp_path, [1], behaviour="hang"), *_toys(tmp_path, range(2, 6), seconds=0.6)]
    report = _service(settings, compile_timeout=2.0, workers=2).ensure(wanted)
    assert [k.status for k in report.kernels] == ["failed"] + ["compiled"] * 4
    assert "did not finish within 2 s" in report.kernels[0].error
    assert report.seconds > 1.2  # the others took longer than the limit of one, together


def test_a_rank_that_is_killed_in_the_middle_costs_one_compile_at_most(settings, tmp_path):
    variables = {**homes(settings), "MUSE_JIT_WORKERS": 2}
    code = SERVICE + _code(tmp_path, seconds=0.5).replace("reach()", "")
    victim = start(code, block=("cutlass", "torch"), **variables)
    deadline = time.monotonic() + 60
    while toy.compiles(tmp_path / "count") < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    other = start(code, block=("cutlass", "torch"), **variables)
    victim.send_signal(signal.SIGKILL)
    victim.communicate()
    out, err = other.communicate(timeout=60)
    assert other.returncode == 0, err
    assert json.loads(out)["values"] == list(range(6))
    assert 6 <= toy.compiles(tmp_path / "count") <= 8  # two were under way


def _stopped_holder(settings, tmp_path, *, workers):
    """A rank that holds the lock of key 0 and a worker's place, and stopped."""
    code = SERVICE + _code(tmp_path, numbers=[0], seconds=0.5).replace("reach()", "")
    victim = start(code, block=("cutlass", "torch"), **homes(settings), MUSE_JIT_WORKERS=workers)
    deadline = time.monotonic() + 60
    while not (tmp_path / "count").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    victim.send_signal(signal.SIGSTOP)
    return victim


def test_a_rank_that_stopped_is_passed_by(settings, tmp_path):
    """It compiles and never publishes: after the stall limit one of those who wait takes its key over."""
    victim = _stopped_holder(settings, tmp_path, workers=3)
    try:
        began = time.monotonic()
        report = _service(settings, stall_limit=1.0, workers=3).ensure(_toys(tmp_path, [0, 5], seconds=0.5))
        assert time.monotonic() - began >= 1.0
        assert [k.status for k in report.kernels] == ["compiled", "compiled"]
        assert toy.compiles(tmp_path / "count") == 3
    finally:
        victim.send_signal(signal.SIGKILL)
        victim.communicate()


def test_a_failed_key_is_a_failure_of_its_own(settings, tmp_path, monkeypatch):
    bad, good = _toys(tmp_path, [1, 2])

    def refuse(self, arch):
        if self.value == 1:
            raise ConstantsError("ToyConstants.value is 1; not on this target")

    monkeypatch.setattr(toy.ToyConstants, "validate_for", refuse)
    report = _service(settings).ensure([bad, good])
    assert [(k.status, k.error) for k in report.kernels] == [
        ("failed", "ToyConstants.value is 1; not on this target"),
        ("compiled", None),
    ]
    assert report.kernels[0].digest == ""


def test_forbid_raises_for_all_that_is_missing_and_loads_what_is_there(settings, tmp_path):
    wanted = _toys(tmp_path, range(4))
    _service(settings).ensure(wanted[:2])
    service = _service(settings, mode="forbid")
    with pytest.raises(MissForbidden, match=r"muse-jit warmup .*\(and 1 more kernels\)$"):
        service.ensure(wanted)
    assert [service.in_memory(c) for c in wanted] == [True, True, False, False]
    assert toy.compiles(tmp_path / "count") == 2


def test_an_interruption_ends_the_workers_and_keeps_what_is_finished(settings, tmp_path):
    """Ctrl-C reaches the caller in the middle of `ensure`."""
    wanted = [*_toys(tmp_path, [1]), *_toys(tmp_path, [2], behaviour="hang")]
    count = tmp_path / "count"

    def interrupt():
        deadline = time.monotonic() + 60
        while toy.compiles(count) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.3)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background has it ignored
    threading.Thread(target=interrupt).start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        _service(settings, workers=1).ensure(wanted)
    assert time.monotonic() - began < 60
    workers = [int(line.split()[0]) for line in count.read_text().splitlines()]
    deadline = time.monotonic() + 5
    while any(map(alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(alive, workers))
    assert _service(settings, mode="forbid").get(wanted[0])() == 1


class _FilePeers:
    """Peers that meet in a folder; one of them is this process."""

    def __init__(self, folder, rank, size):
        self.folder, self.rank, self.size, self.round = folder, rank, size, 0

    def gather(self, value):
        self.round += 1
        path = self.folder / f"{self.round}-{self.rank}"
        path.with_suffix(".part").write_text(json.dumps(value))
        path.with_suffix(".part").rename(path)
        paths = [self.folder / f"{self.round}-{rank}" for rank in range(self.size)]
        deadline = time.monotonic() + 60
        while not all(p.exists() for p in paths) and time.monotonic() < deadline:
            time.sleep(0.005)
        return [json.loads(p.read_text()) for p in paths]


PEERS = """
import pathlib, socket
import muse_jit.store.lock as lock
from test_ensure import _FilePeers
socket.gethostname = lambda: {host!r}
if {no_locks}:  # as on a network file system whose locks reach no other host
    from contextlib import contextmanager
    @contextmanager
    def no_lock(layout, path, what): yield lock.Held(path + {host!r}, None)
    lock.try_lock = no_lock
reach()
s = service()
wanted = [toy.ToyConstants(value=v, count_file={count!r}, seconds=0.1) for v in range(6)]
report = s.ensure(wanted, peers=_FilePeers(pathlib.Path({folder!r}), {rank}, 4))
print(report.compiled, report.hits, [s.get(c)() for c in wanted])
"""


@pytest.mark.parametrize("no_locks", [False, True])
def test_hosts_that_share_the_folder_divide_the_kernels(settings, tmp_path, no_locks):
    meeting = tmp_path / "meeting"
    meeting.mkdir()
    codes = [
        PEERS.format(host=host, folder=str(meeting), rank=rank, count=str(tmp_path / "count"), no_locks=no_locks)
        for rank, host in enumerate(("node-a", "node-a", "node-b", "node-b"))
    ]
    if no_locks:
        codes = [code for code in codes if "node-a" in code][:1] + [code for code in codes if "node-b" in code][:1]
        codes = [c.replace(f"), {r}, 4)", f"), {i}, 2)") for i, (c, r) in enumerate(zip(codes, (0, 2), strict=True))]
    outs = [out.split(" ", 2) for out in values(together(tmp_path, codes, MUSE_JIT_WORKERS=2, **homes(settings)))]
    assert [out[2] for out in outs] == ["[0, 1, 2, 3, 4, 5]"] * len(codes)
    assert toy.compiles(tmp_path / "count") == 6
    half = len(codes) // 2
    assert sum(int(out[0]) for out in outs[:half]) == 3 == sum(int(out[0]) for out in outs[half:])
    assert [p.name for p in (tmp_path / "cache" / "staging-v1").iterdir()] == []


def test_a_host_with_a_folder_of_its_own_compiles_everything(settings, tmp_path):
    meeting = tmp_path / "meeting"
    meeting.mkdir()
    codes = [
        PEERS.format(host=host, folder=str(meeting), rank=rank, count=str(tmp_path / host), no_locks=False)
        .replace(", 4)", ", 2)")
        .replace("service()", f"service(cache_dir={str(tmp_path / 'cache' / host)!r})")
        for rank, host in enumerate(("node-a", "node-b"))
    ]
    outs = values(together(tmp_path, codes, MUSE_JIT_WORKERS=2, **homes(settings)))
    assert [out.split()[0] for out in outs] == ["6", "6"]
    assert socket.gethostname() not in ("node-a", "node-b")


def test_the_place_of_a_stopped_holder_is_waited_for_only_so_long(settings, tmp_path, monkeypatch):
    import muse_jit.fill

    monkeypatch.setattr(muse_jit.fill, "SLOT_SECONDS", 0.5)
    layout = Layout(settings.cache_dir)
    layout.create()
    service = _service(settings, workers=1)
    with service.flight.place(0.0) as got:
        assert got
        began = time.monotonic()
        report = _service(settings, workers=1).ensure(_toys(tmp_path, [1]))
        assert time.monotonic() - began >= 0.5
    assert report.compiled == 1


def test_a_damaged_entry_is_looked_at_once_while_others_have_all_places(settings, tmp_path, monkeypatch):
    import muse_jit.fill

    monkeypatch.setattr(muse_jit.fill, "SLOT_SECONDS", 0.6)
    wanted = _toys(tmp_path, [1])
    first = _service(settings)
    first.ensure(wanted)
    (library,) = (tmp_path / "cache").glob("entries-v1/*/*/kernel.so")
    library.write_bytes(b"")
    service = _service(settings, workers=1)
    with first.flight.place(0.0):
        report = service.ensure(wanted)
    assert (report.compiled, report.misses) == (1, {"truncated": 1})
    assert service.counters.misses == {"truncated": 2}  # and once more under the lock
    assert service.get(wanted[0])() == 1


def test_settings_of_the_environment_reach_a_service():
    assert Settings.from_environ({"MUSE_JIT_LATE_COMPILE": "error"}).late_compile == "error"


def test_what_this_process_ended_is_no_failure_for_those_who_wait(settings, tmp_path):
    """A is interrupted in the middle of a compile and lives on; B waited for it and compiles."""
    count = tmp_path / "count"
    code = (
        SERVICE
        + f"s = service()\nc = toy.ToyConstants(value=1, count_file={str(count)!r}, seconds=2.0)\n"
        + "try: s.ensure([c])\nexcept KeyboardInterrupt: print('interrupted', flush=True)\ntime.sleep(60)\n"
    )
    first = start(code, block=("cutlass", "torch"), **homes(settings))
    try:
        deadline = time.monotonic() + 60
        while not count.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        reports = []
        wanted = [toy.ToyConstants(value=1, count_file=str(count), seconds=2.0)]
        waiter = threading.Thread(target=lambda: reports.append(_service(settings).ensure(wanted)))
        waiter.start()
        time.sleep(0.3)
        first.send_signal(signal.SIGINT)
        assert first.stdout.readline() == "interrupted\n"
        waiter.join(60)
        assert (reports[0].failed, reports[0].compiled) == (0, 1)
    finally:
        first.kill()
        first.communicate()


def test_a_source_that_never_stays_the_same_fails_and_does_not_go_on_for_ever(settings, tmp_path, monkeypatch):
    from muse_jit.errors import SourceChanged
    from muse_jit.single_flight import SingleFlight

    asked = []

    def changed(self, *arguments, **named):
        asked.append(1)
        raise SourceChanged("the kernel's source changed while it was compiled; ask again")

    monkeypatch.setattr(SingleFlight, "_compile", changed)
    report = _service(settings).ensure(_toys(tmp_path, [1]))
    assert (report.failed, len(asked)) == (1, 2)
    assert "source changed" in report.kernels[0].error


def test_who_takes_over_keeps_the_place_it_has(settings, tmp_path, monkeypatch):
    """All places are taken, one of them by the stopped holder and one by the thread that takes over."""
    import muse_jit.single_flight

    monkeypatch.setattr(muse_jit.single_flight, "SLOT_SECONDS", 30.0)
    victim = _stopped_holder(settings, tmp_path, workers=2)
    try:
        began = time.monotonic()
        report = _service(settings, stall_limit=1.0, workers=2).ensure(_toys(tmp_path, [0], seconds=0.5))
        assert report.compiled == 1
        assert time.monotonic() - began < 25.0
    finally:
        victim.send_signal(signal.SIGKILL)
        victim.communicate()


def test_verify_after_an_edit_compares_nothing_with_the_old_entry(settings, tmp_path, monkeypatch):
    from muse_jit.errors import SourceChanged
    from muse_jit.service import JitService as Service
    from muse_jit.single_flight import SingleFlight

    wanted = _toys(tmp_path, [1])
    _service(settings).ensure(wanted)
    real, real_forget = SingleFlight._compile, Service.forget_sources
    calls = []

    def compile_edited(self, request, **named):
        calls.append(request.key.digest)
        if len(calls) == 1:
            raise SourceChanged("edited")
        return real(self, request, **named)

    def forget(self):
        real_forget(self)
        self.options = {"LINEINFO": "1"}  # stands for the edit: another key from now on

    monkeypatch.setattr(SingleFlight, "_compile", compile_edited)
    monkeypatch.setattr(Service, "forget_sources", forget)
    report = _service(settings, mode="verify").ensure(wanted)
    assert (report.failed, report.compiled) == (0, 1), report.kernels[0].error
    assert len(set(calls)) == 2


def test_an_entry_that_cannot_be_opened_and_not_be_rebuilt_fails_alone(settings, tmp_path, monkeypatch):
    from muse_jit.errors import LoadError
    from muse_jit.loader import kernel as loader

    wanted = _toys(tmp_path, [1, 2])
    _service(settings).ensure(wanted)
    real = loader.load

    def load(entry, artifact, runtime):
        if entry.key["constants"]["value"] == 1:
            raise LoadError("it cannot be opened")
        return real(entry, artifact, runtime)

    monkeypatch.setattr(loader, "load", load)
    monkeypatch.setenv("PATH", str(tmp_path))  # and there is no linker
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    service = _service(settings)
    report = service.ensure(wanted)
    assert [k.status for k in report.kernels] == ["failed", "hit"]
    assert service.get(wanted[1])() == 2


def test_a_rank_that_raises_leaves_no_other_waiting(settings, tmp_path, monkeypatch):
    class Alone:
        calls = 0

        def gather(self, value):
            self.calls += 1
            return [value]

    peers = {}
    for name in ("fine", "raises"):
        peers[name] = Alone()
        if name == "raises":
            monkeypatch.setenv("PATH", str(tmp_path))
            monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
            with pytest.raises(Exception, match="no linker"):
                _service(settings).ensure(_toys(tmp_path, [2]), peers=peers[name])
        else:
            _service(settings).ensure(_toys(tmp_path, [1]), peers=peers[name])
    assert peers["fine"].calls == peers["raises"].calls == 3


def test_a_forced_compile_that_cannot_be_stored_leaves_the_entry_there(settings, tmp_path, monkeypatch):
    from muse_jit.store.layout import Layout

    (constants,) = wanted = _toys(tmp_path, [1])
    _service(settings).ensure(wanted)

    def full(self, path, data):
        raise OSError(28, "No space left on device")

    service = _service(settings)
    monkeypatch.setattr(Layout, "write_new", full)
    assert service.obtain(constants, force=True).not_stored
    monkeypatch.undo()
    assert _service(settings, mode="forbid").get(constants)() == 1


def test_what_this_machine_lacks_is_not_blamed_on_an_entry(settings, tmp_path, monkeypatch):
    from muse_jit.errors import LoadError

    (constants,) = wanted = _toys(tmp_path, [1])
    _service(settings).ensure(wanted)
    service = _service(settings)
    service._open_runtime()

    def none_left(name, flags):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", none_left)
    with pytest.raises(LoadError, match="Too many open files"):
        service.get(constants)
    monkeypatch.undo()
    assert _service(settings, mode="forbid").get(constants)() == 1
    assert not list((tmp_path / "cache").glob("set-aside-v1/*"))
