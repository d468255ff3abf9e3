"""Threads, memory, descriptors, processes and forks: what the service takes, and what it leaves alone."""

import json
import os
import pathlib
import signal
import threading
import time

import pytest
from field.barrier import NO_COMPILER, SERVICE, homes
from support import toy
from support.process import run, start

from muse_jit.service import JitService
from muse_jit.store.lookup import Hit

pytestmark = pytest.mark.processes

USE = """
import json
def usage():
    for line in open("/proc/self/status"):
        if line.startswith("VmRSS:"): memory = int(line.split()[1])
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), memory
s = service()
"""


def _json(code, settings, **variables):
    out = run(SERVICE + USE + code, block=NO_COMPILER, **homes(settings), **variables)
    return json.loads(out)


def test_l4_threads_descriptors_and_memory_stay_flat_over_compiles(settings):
    """Each compile has a process of its own, so what it takes goes with it; 30 show it as well as 200."""
    before, after = _json(
        "used = []\n"
        "for n in range(30):\n"
        "    s.obtain(toy.ToyConstants(value=n))\n"
        "    used.append(usage())\n"
        "print(json.dumps([used[4], used[-1]]))",
        settings,
    )
    assert before[0] == after[0] == 1
    assert after[1] == before[1]
    assert after[2] - before[2] < 4096  # KiB, for 25 compiles


FILLED = """
import dataclasses, subprocess, tempfile
from muse_jit.key.encoding import content_digest
from muse_jit.store.publish import publish
first = s.obtain(toy.ToyConstants(value=7)).hit.entry
toys = [toy.ToyConstants(value=1000 + n) for n in range(300)]
keys = [s.key_of(t)[1] for t in toys]
with tempfile.TemporaryDirectory() as folder:  # one library in which every key finds its symbol
    toy._Object(7).export_to_c(folder + "/k.o", function_name=first.symbol)
    names = [f"-Wl,--defsym=__tvm_ffi_{k.symbol}=__tvm_ffi_{first.symbol}" for k in keys]
    subprocess.run(["cc", "-shared", "-nostdlib", "-o", folder + "/k.so", folder + "/k.o", *names], check=True)
    artifact = pathlib.Path(folder, "k.so").read_bytes()
same = dict(artifact_digest=content_digest(artifact), artifact_size=len(artifact))
for k in keys:
    entry = dataclasses.replace(first, digest=k.digest, key=k.document, symbol=k.symbol, **same)
    publish(s.layout, entry, artifact)
s = service(mode="forbid")
used = []
"""


def test_l4_look_ups_of_300_keys_take_no_thread_no_descriptor_and_no_memory(settings):
    before, after = _json(
        FILLED + "for t in toys:\n    s.obtain(t)\n    used.append(usage())\nprint(json.dumps([used[99], used[-1]]))",
        settings,
    )
    assert before[0] == after[0] == 1
    assert after[1] == before[1]
    assert after[2] - before[2] < 4096


def test_l4_300_loaded_kernels_take_no_thread_no_descriptor_and_a_library_each(settings):
    before, after = _json(
        FILLED
        + "for t in toys:\n    assert s.get(t)() == 7\n    used.append(usage())\n"
        + "for t in toys:\n    assert s.get(t)() == 7\nused.append(usage())\n"
        + "print(json.dumps([used[99], used[-1]]))",
        settings,
    )
    assert before[0] == after[0]
    assert after[1] == before[1]
    assert after[2] - before[2] < 200 * 256  # KiB a library, with its pages and the loader's book-keeping


FORKED = """
a, b, c = (toy.ToyConstants(value=v, count_file={count!r}) for v in (11, 12, 13))
s.get(a)  # compiled here
service().obtain(b)  # on disk
def child():
    assert s.get(a)() == 11 and s.get(b)() == 12 and s.get(c)() == 13
    assert service().get(c)() == 13
def fork(depth):
    pid = os.fork()
    if pid == 0:
        try:
            child()
            if depth: fork(depth - 1)
            os._exit(0)
        except BaseException:
            import traceback; traceback.print_exc()
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
fork(1)
assert s.get(c)() == 13
print(json.dumps(s.counters.compiled))
"""


def test_b8_l5_a_forked_child_and_its_child_hit_load_and_compile(settings, tmp_path):
    count = tmp_path / "count"
    assert _json(FORKED.format(count=str(count)), settings) == 1
    assert toy.compiles(count) == 3


FORK_DURING_COMPILE = """
c = toy.ToyConstants(value=3, count_file={count!r}, seconds=1.0)
thread = threading.Thread(target=s.get, args=(c,))
thread.start()
while not pathlib.Path({count!r}).exists(): time.sleep(0.005)
pid = os.fork()
if pid == 0:
    os._exit(int(s.get({asked})()))
thread.join()
deadline, status = time.monotonic() + 10, None
while status is None and time.monotonic() < deadline:
    ended, code = os.waitpid(pid, os.WNOHANG)
    status = os.waitstatus_to_exitcode(code) if ended else None
    time.sleep(0.01)
if status is None:
    os.kill(pid, 9)
    os.waitpid(pid, 0)
print(json.dumps([status, int(s.get(c)())]))
"""


@pytest.mark.parametrize("asked", ["c", "toy.ToyConstants(value=4)"])
def test_b8_l5_a_child_forked_while_a_thread_compiles_can_ask_for_the_same_and_for_another(settings, tmp_path, asked):
    count = tmp_path / "count"
    child, parent = _json(FORK_DURING_COMPILE.format(count=str(count), asked=asked), settings)
    assert parent == 3
    assert child == (3 if asked == "c" else 4)
    assert toy.compiles(count) == 1


def test_l6_a_daemonic_process_compiles_and_waits_like_any_other(settings, tmp_path):
    count = tmp_path / "count"
    values = _json(
        "import multiprocessing\n"
        "def work(queue, value):\n"
        f"    queue.put(int(s.get(toy.ToyConstants(value=value, count_file={str(count)!r}, seconds=0.3))()))\n"
        "context = multiprocessing.get_context('fork')\n"
        "queue = context.Queue()\n"
        "processes = [context.Process(target=work, args=(queue, n % 2), daemon=True) for n in range(4)]\n"
        "for p in processes: p.start()\n"
        "got = sorted(queue.get(timeout=60) for _ in processes)\n"
        "for p in processes: p.join()\n"
        "print(json.dumps(got))",
        settings,
    )
    assert values == [0, 0, 1, 1]
    assert toy.compiles(count) == 2


def test_l9_many_threads_on_few_keys_compile_each_key_once(settings, tmp_path):
    count = tmp_path / "count"
    service = JitService("sm_90a", settings)
    barrier = threading.Barrier(24)
    results = []

    def work(value):
        barrier.wait()
        results.append(int(service.get(toy.ToyConstants(value=value, count_file=str(count), seconds=0.1))()))

    threads = [threading.Thread(target=work, args=(n % 3,)) for n in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [0] * 8 + [1] * 8 + [2] * 8
    assert toy.compiles(count) == service.counters.compiled == 3


def test_l9_hits_never_wait_for_a_compile(settings, tmp_path):
    count = tmp_path / "count"
    service = JitService("sm_90a", settings)
    in_memory, on_disk = toy.ToyConstants(value=1), toy.ToyConstants(value=2)
    service.get(in_memory)
    service.obtain(on_disk)
    slow = toy.ToyConstants(value=3, count_file=str(count), seconds=3.0)
    thread = threading.Thread(target=service.get, args=(slow,))
    thread.start()
    while not count.exists():
        time.sleep(0.005)
    assert service.get(in_memory)() == 1
    assert service.get(on_disk)() == 2
    assert isinstance(service.find(on_disk), Hit)
    assert thread.is_alive()
    thread.join()


def test_l10_nothing_opens_the_driver_for_a_named_target(settings):
    opened = _json(
        "import ctypes\n"
        "opened, real = [], ctypes.CDLL.__init__\n"
        "def spy(self, name, *rest, **named):\n"
        "    opened.append(str(name))\n"
        "    real(self, name, *rest, **named)\n"
        "ctypes.CDLL.__init__ = spy\n"
        "s = service()\n"
        "c = toy.ToyConstants(value=3)\n"
        "s.find(c); s.get(c); s.find(c)\n"
        "import cache_tools.cli\n"
        "from muse_jit.store.listing import listed\n"
        "assert len(list(listed(s.layout))) == 1\n"
        "maps = open('/proc/self/maps').read()\n"
        "print(json.dumps([opened, [n for n in ('libcuda.so', 'libnvidia-ml', 'libcudart') if n in maps]]))",
        settings,
    )
    assert [name for name in opened[0] if "libcuda." in name or "nvidia-ml" in name] == []
    assert opened[1] == []


def test_l11_nothing_keeps_what_a_kernel_was_called_with(settings):
    assert _json(
        "import gc, weakref, numpy\n"
        "kernel = s.get(toy.ToyConstants(value=3))\n"
        "def call():\n"
        "    operand = numpy.zeros(1 << 20)\n"
        "    assert kernel(operand.ctypes.data) == 3\n"
        "    class Operand: pass\n"
        "    other = Operand()\n"
        "    try: kernel(other)\n"
        "    except Exception: pass\n"
        "    return weakref.ref(operand), weakref.ref(other)\n"
        "refs = call()\n"
        "gc.collect()\n"
        "print(json.dumps([r() is None for r in refs]))",
        settings,
    ) == [True, True]


def test_g8_a_warm_up_that_is_killed_again_and_again_makes_progress(settings, tmp_path):
    """Killed in the middle of every third compile. Each finished key is there at once and is never compiled again."""
    count = tmp_path / "count"
    wanted = list(range(8))
    code = (
        SERVICE + "s = service()\n"
        f"for v in {wanted!r}: s.obtain(toy.ToyConstants(value=v, count_file={str(count)!r}, seconds=0.3))\n"
        "print('done')"
    )
    kills = 0
    while True:
        process = start(code, block=NO_COMPILER, **homes(settings))
        before = toy.compiles(count)
        while process.poll() is None and toy.compiles(count) < before + 3:
            time.sleep(0.002)
        if process.poll() is not None:
            out, err = process.communicate()
            assert out.strip() == "done", err
            break
        process.send_signal(signal.SIGKILL)
        process.communicate()
        kills += 1
        assert kills <= len(wanted)
        service = JitService("sm_90a", settings)
        found = [service.find(toy.ToyConstants(value=v, count_file=str(count), seconds=0.3)) for v in wanted]
        finished = sum(isinstance(f, Hit) for f in found)
        assert finished >= 2 * kills
        assert toy.compiles(count) <= finished + kills
    assert kills >= 2
    assert toy.compiles(count) <= len(wanted) + kills


def test_l8_g8_a_finished_key_is_there_before_the_next_one_begins(settings, tmp_path):
    service = JitService("sm_90a", settings)
    for value in range(3):
        constants = toy.ToyConstants(value=value)
        service.obtain(constants)
        folder = pathlib.Path(service.layout.entry(service.key_of(constants)[1].digest))
        assert sorted(os.listdir(folder)) == ["entry.json", "kernel.so"]
