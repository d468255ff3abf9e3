"""The forking server: one import for many kernels, replaced when it dies, gone when nobody needs it."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from support import toy
from support.process import alive, run

from muse_jit.compiler import forkserver
from muse_jit.errors import CompileError
from muse_jit.service import JitService

pytestmark = pytest.mark.processes


@pytest.fixture(autouse=True)
def _own_servers():
    """Each test starts without a server and leaves none."""
    forkserver.end_servers()
    yield
    forkserver.end_servers()


def _service(settings):
    return JitService("sm_90a", settings)


def _toy(tmp_path, value, **more):
    return toy.ToyConstants(value=value, count_file=str(tmp_path / "count"), **more)


def _until(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def test_one_server_forks_a_worker_for_each_kernel(settings, tmp_path):
    service = _service(settings)
    for value in range(4):
        service.obtain(_toy(tmp_path, value))
    workers = {line.split()[0] for line in (tmp_path / "count").read_text().splitlines()}
    assert len(workers) == 4
    (server,) = {server for _, _, server in toy.times(tmp_path / "count")}
    assert alive(server)
    assert not any(alive(int(worker)) for worker in workers)


def test_a_server_never_imports_what_a_kernel_consists_of(settings, tmp_path):
    """Each worker imports the kernels as they are on disk: an edit between two compiles of one server is seen."""
    service = _service(settings)
    service.obtain(_toy(tmp_path, 1))
    (_, _, server) = toy.times(tmp_path / "count")[0]
    with open(f"/proc/{server}/maps") as file:
        assert "muse_jit" not in file.read()
    with open(f"/proc/{server}/environ") as file:
        assert "CUDA_VISIBLE_DEVICES=\0" in file.read()
    assert len(os.listdir(f"/proc/{server}/task")) == 1


def test_a_server_that_imported_the_real_compiler_has_one_thread():
    code = (
        "import os, muse_jit\n"
        "from muse_jit.compiler import forkserver\n"
        "from muse_jit.settings import Settings\n"
        "s = muse_jit.JitService('sm_90a', Settings().with_options(mode='off'))\n"
        "c = muse_jit.RowNormConstants(hidden=2048, eps=1e-5, has_weight=False, gain_center=0.0)\n"
        "s.obtain(c)\n"
        "(server,) = forkserver._servers.values()\n"
        "print(len(os.listdir(f'/proc/{server.process.pid}/task')))\n"
    )
    assert run(code, block=("torch", "cutlass")).strip() == "1"


def test_a_kernel_whose_server_is_killed_is_compiled_by_another(settings, tmp_path):
    result = []
    constants = _toy(tmp_path, 7, seconds=1.0)
    thread = threading.Thread(target=lambda: result.append(_service(settings).obtain(constants).status))
    thread.start()
    assert _until((tmp_path / "count").exists)
    (server,) = forkserver._servers.values()
    first = int((tmp_path / "count").read_text().split()[0])
    os.kill(server.process.pid, signal.SIGKILL)
    thread.join(60)
    assert result == ["compiled"]
    assert toy.compiles(tmp_path / "count") == 2
    assert not alive(first)
    assert len(toy.times(tmp_path / "count")) == 1  # the first worker did not come to its end


def test_a_server_that_dies_again_is_an_error_of_this_kernel_alone(settings, tmp_path, monkeypatch):
    broken = tmp_path / "server.py"
    broken.write_text("import sys\nsys.exit('no compiler today')\n")
    monkeypatch.setattr(forkserver, "_SERVER", str(broken))
    with pytest.raises(CompileError, match="the compile server died twice: no compiler today"):
        _service(settings).obtain(_toy(tmp_path, 1))
    monkeypatch.undo()
    assert _service(settings).obtain(_toy(tmp_path, 1)).status == "compiled"


def test_ended_servers_end_their_workers_and_say_so(settings, tmp_path):
    caught = []

    def work():
        try:
            _service(settings).obtain(_toy(tmp_path, 1, behaviour="hang"))
        except CompileError as error:
            caught.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    assert _until((tmp_path / "count").exists)
    worker = int((tmp_path / "count").read_text().split()[0])
    forkserver.end_servers()
    thread.join(20)
    assert "the compile was ended" in caught[0]
    assert _until(lambda: not alive(worker))


def test_a_server_that_stopped_is_ended_at_the_compile_timeout(settings, tmp_path):
    service = _service(settings.with_options(compile_timeout=1.0))
    service.obtain(_toy(tmp_path, 1))
    (server,) = forkserver._servers.values()
    os.kill(server.process.pid, signal.SIGSTOP)
    with pytest.raises(CompileError, match="did not finish within 1 s"):
        service.obtain(_toy(tmp_path, 2))
    assert not alive(server.process.pid)
    assert service.obtain(_toy(tmp_path, 3)).status == "compiled"


def test_an_idle_server_ends_and_the_next_kernel_gets_another(settings, tmp_path, monkeypatch):
    quick = tmp_path / "server.py"
    with open(forkserver._SERVER) as file:
        text = file.read()
    assert "IDLE_SECONDS = 30.0" in text
    text = text.replace("IDLE_SECONDS = 30.0", "IDLE_SECONDS = 0.1").replace(
        "os.path.abspath(__file__)", repr(forkserver._SERVER)
    )
    quick.write_text(text)
    monkeypatch.setattr(forkserver, "_SERVER", str(quick))
    service = _service(settings)
    service.obtain(_toy(tmp_path, 1))
    (server,) = forkserver._servers.values()
    assert server.process.wait(20) == 0
    assert service.obtain(_toy(tmp_path, 2)).status == "compiled"


def test_a_forked_child_does_not_use_or_end_its_parents_server(settings, tmp_path):
    service = _service(settings)
    service.obtain(_toy(tmp_path, 1))
    (server,) = forkserver._servers.values()
    child = os.fork()
    if child == 0:
        try:
            service.obtain(_toy(tmp_path, 2))
            (own,) = forkserver._servers.values()
            os._exit(0 if own.process.pid != server.process.pid else 1)
        except BaseException:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert service.obtain(_toy(tmp_path, 3)).status == "compiled"
    servers = [server for _, _, server in toy.times(tmp_path / "count")]
    assert servers[0] == servers[2] == server.process.pid != servers[1]


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM])
def test_a_server_ends_with_its_parent_also_where_a_child_of_it_lives_on(settings, tmp_path, ending):
    code = (
        "import os, sys, time\nimport muse_jit\nfrom support import toy\nfrom muse_jit.compiler import forkserver\n"
        "from muse_jit.settings import Settings\n"
        f"s = muse_jit.JitService('sm_90a', Settings().with_options(cache_dir={settings.cache_dir!r}))\n"
        "s.obtain(toy.ToyConstants(value=1))\n"
        "child = os.fork()\n"
        "if child == 0: time.sleep(60); os._exit(0)\n"
        "(server,) = forkserver._servers.values()\n"
        "print(child, server.process.pid, flush=True)\ntime.sleep(60)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.path.dirname(os.path.dirname(toy.__file__))}
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
    child, server = map(int, process.stdout.readline().split())
    try:
        process.send_signal(ending)
        process.wait()
        assert _until(lambda: not alive(server), 5.0)
        assert alive(child)
    finally:
        os.kill(child, signal.SIGKILL)
        process.stdout.close()


def test_no_descriptor_of_somebody_else_is_closed(settings, tmp_path):
    """A server that stopped is dropped at the time-out, and asked for again: its numbers may be others' by then."""
    service = _service(settings.with_options(compile_timeout=1.0))
    service.obtain(_toy(tmp_path, 1))
    (server,) = forkserver._servers.values()
    log = server.log.fileno()
    os.kill(server.process.pid, signal.SIGSTOP)
    with pytest.raises(CompileError, match="did not finish"):
        service.obtain(_toy(tmp_path, 2))
    forkserver._drop(server)
    mine = [os.open(os.devnull, os.O_RDONLY) for _ in range(8)]
    try:
        assert log in mine
        forkserver._drop(server)
        service.obtain(_toy(tmp_path, 3))
        assert [os.fstat(descriptor).st_rdev for descriptor in mine] == [os.stat(os.devnull).st_rdev] * 8
    finally:
        for descriptor in mine:
            os.close(descriptor)


def test_a_server_that_stopped_fails_the_kernel_that_timed_out_and_no_other(settings, tmp_path):
    results = {}

    def work(value, timeout, seconds):
        service = _service(settings.with_options(compile_timeout=timeout, workers=4))
        try:
            results[value] = service.obtain(_toy(tmp_path, value, seconds=seconds)).status
        except CompileError as error:
            results[value] = str(error)

    _service(settings).obtain(_toy(tmp_path, 0))
    (server,) = forkserver._servers.values()
    threads = [threading.Thread(target=work, args=a) for a in ((1, 1.0, 30.0), (2, 60.0, 0.5))]
    for thread in threads:
        thread.start()
    assert _until(lambda: toy.compiles(tmp_path / "count") == 3)
    os.kill(server.process.pid, signal.SIGSTOP)
    for thread in threads:
        thread.join(60)
    assert "did not finish within 1 s" in results[1]
    assert results[2] == "compiled"


def test_what_a_dead_worker_left_is_cleared_also_where_it_is_a_folder(tmp_path):
    for name in ("request.json", "log", "kernel.o"):
        (tmp_path / name).write_text("")
    (tmp_path / "dump" / "deep").mkdir(parents=True)
    forkserver._clear(str(tmp_path))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log", "request.json"]
    forkserver._clear(str(tmp_path / "gone"))


def test_a_caller_that_blocks_signals_gets_its_kernel(settings, tmp_path):
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    try:
        service = _service(settings.with_options(compile_timeout=20.0))
        assert service.obtain(_toy(tmp_path, 1)).status == "compiled"
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})


def test_trouble_of_this_machine_fails_one_kernel_with_its_name(settings, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    report = _service(settings).ensure([_toy(tmp_path, 1)])
    assert report.failed == 1
    assert "toy for sm_90a, CUDA 13, x86_64 cannot be compiled here: [Errno 2]" in report.kernels[0].error
