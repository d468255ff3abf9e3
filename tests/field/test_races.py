"""Cold starts: many processes, one empty cache. Each test's name carries the ids of the reports it answers."""

import builtins
import collections
import errno
import os
import pathlib
import random
import re
import shutil
import tempfile
import threading
import time

import pytest
from field.barrier import NO_COMPILER, SERVICE, homes, together, values
from field.syscalls import litter
from support import toy
from support.entries import entry, key
from support.process import start

from muse_jit.compiler import build as build_module
from muse_jit.key.encoding import content_digest
from muse_jit.service import JitService
from muse_jit.store.layout import Layout
from muse_jit.store.lookup import Hit, Miss, Reason, read_entry
from muse_jit.store.publish import publish, set_aside

pytestmark = pytest.mark.processes

GET = """
s = service()
reach()
print([s.get(toy.ToyConstants(value=v, count_file={count!r}, seconds=0.2))() for v in {values!r}])
"""


def _entries(root):
    return sorted(str(p.relative_to(root)) for p in pathlib.Path(root, "entries-v1").rglob("*") if p.is_file())


def _toys(settings, count, wanted):
    service = JitService("sm_90a", settings)
    return service, [toy.ToyConstants(value=v, count_file=str(count), seconds=0.2) for v in wanted]


def test_a3_a6_a7_a10_a13_a14_a15_a16_a18_eight_processes_fill_one_empty_cache(tmp_path, settings):
    """None of the folders above the cache is there either, and each process asks in another order."""
    root, count = tmp_path / "new" / "deep" / "cache", tmp_path / "count"
    wanted = [1, 2, 3]
    orders = [wanted[n % 3 :] + wanted[: n % 3] for n in range(8)]
    codes = [GET.format(count=str(count), values=order) for order in orders]
    ended = together(tmp_path, codes, timeout=120, MUSE_JIT_CACHE_DIR=root)
    assert values(ended) == [str(order) for order in orders]
    assert toy.compiles(count) == len(wanted)
    assert [e.err for e in ended] == [""] * 8  # nobody warns about anybody else
    service, toys = _toys(settings.with_options(cache_dir=str(root)), count, wanted)
    digests = sorted(service.key_of(t)[1].digest for t in toys)
    names = [f"entries-v1/{d[:2]}/{d}/{n}" for d in digests for n in ("entry.json", "kernel.so")]
    assert _entries(root) == names  # no copy per rank, and names that only the keys decide
    assert litter(root) == []
    assert os.listdir(root / "staging-v1") == []


def test_a6_a_zero_byte_artifact_is_rebuilt_once_by_whoever_comes_first(tmp_path, settings):
    count = tmp_path / "count"
    service, (constants,) = _toys(settings, count, [4])
    service.obtain(constants)
    path = pathlib.Path(service.layout.entry(service.key_of(constants)[1].digest), "kernel.so")
    path.write_bytes(b"")
    assert service.find(constants).reason == Reason.TRUNCATED
    codes = [GET.format(count=str(count), values=[4])] * 4
    assert values(together(tmp_path, codes, **homes(settings))) == ["[4]"] * 4
    assert toy.compiles(count) == 2
    assert isinstance(service.find(constants), Hit)


@pytest.fixture
def filled(tmp_path, settings):
    service, (constants,) = _toys(settings, tmp_path / "count", [4])
    service.obtain(constants)
    return service, constants


def test_a1_no_reader_lists_a_folder_of_the_cache(filled, settings, monkeypatch):
    service, constants = filled
    listed = []

    def spy(real):
        return lambda path=".", *rest: listed.append(str(path)) or real(path, *rest)

    for name in ("listdir", "scandir"):
        monkeypatch.setattr(os, name, spy(getattr(os, name)))
    reader = JitService("sm_90a", settings)
    assert isinstance(reader.find(constants), Hit)
    assert reader.get(constants)() == 4
    os.listdir(service.layout.entries)  # the spy sees it
    assert [path for path in listed if path.startswith(service.layout.root)] == [service.layout.entries]


def test_a1_a19_names_in_staging_differ_with_one_clock_one_seed_and_one_process_id(tmp_path, monkeypatch):
    layout = Layout(str(tmp_path))
    monkeypatch.setattr(time, "time", lambda: 1e9)
    monkeypatch.setattr(time, "time_ns", lambda: 10**18)
    monkeypatch.setattr(os, "getpid", lambda: 17)
    names = []
    for _ in range(4):
        reading, writing = os.pipe()
        random.seed(0)
        child = os.fork()
        if child == 0:
            os.write(writing, "\n".join(layout.unique("staging-v1") for _ in range(20)).encode())
            os._exit(0)
        os.close(writing)
        with open(reading) as file:
            names += file.read().splitlines()
        os.waitpid(child, 0)
    per_thread = []
    threads = [threading.Thread(target=lambda: per_thread.append(layout.unique("staging-v1"))) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(names + per_thread)) == 100


def test_a2_a_failed_cleanup_is_not_fatal(settings, tmp_path, monkeypatch):
    def busy(*arguments, **named):
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(os, "rmdir", busy)
    monkeypatch.setattr(shutil.os, "unlink", busy)
    service, (constants,) = _toys(settings, tmp_path / "count", [4])
    assert service.obtain(constants).hit.artifact[:4] == b"\x7fELF"
    monkeypatch.undo()
    assert toy.compiles(tmp_path / "count") == 1
    assert isinstance(service.find(constants), Hit)


def test_a2_the_builder_uses_what_it_built_where_the_published_entry_is_not_visible(settings, tmp_path, monkeypatch):
    service, (constants,) = _toys(settings, tmp_path / "count", [4])
    rename = os.rename

    def vanishing(source, target, **named):
        rename(source, target, **named)
        if "entries-v1" in target:
            rename(target, str(tmp_path / "not visible yet"))

    monkeypatch.setattr(os, "rename", vanishing)
    assert service.get(constants)() == 4
    assert toy.compiles(tmp_path / "count") == 1


def test_a5_who_loses_the_race_to_an_invisible_winner_returns_its_own_artifact(settings, tmp_path, monkeypatch):
    service, (constants,) = _toys(settings, tmp_path / "count", [4])
    rename = os.rename

    def losing(source, target, **named):
        if "entries-v1" in target:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))
        rename(source, target, **named)

    monkeypatch.setattr(os, "rename", losing)
    assert service.get(constants)() == 4
    assert service.counters.not_stored == 1
    assert toy.compiles(tmp_path / "count") == 1


def test_a5_who_loses_the_race_leaves_the_winner_and_returns_its_own_artifact(settings, tmp_path, monkeypatch):
    service, (constants,) = _toys(settings, tmp_path / "count", [4])
    other = JitService("sm_90a", settings.with_options(mode="off")).obtain(constants).hit
    build = build_module.build

    def overtaken(*arguments, **named):
        built = build(*arguments, **named)
        publish(service.layout, other.entry, other.artifact)
        return built

    monkeypatch.setattr(build_module, "build", overtaken)
    stored = service.obtain(constants)
    assert stored.status == "compiled"
    assert stored.not_stored == ""
    assert stored.hit.artifact == other.artifact
    assert service.find(constants).entry == other.entry
    assert os.listdir(os.path.join(service.layout.root, "staging-v1")) == []


def test_a4_a10_each_builder_works_in_a_private_folder(settings, tmp_path, monkeypatch):
    seen = []
    run_worker = build_module.run_worker

    def spying(request, folder, *rest):
        seen.append((folder, os.stat(folder).st_mode & 0o777))
        return run_worker(request, folder, *rest)

    monkeypatch.setattr(build_module, "run_worker", spying)
    services = [JitService("sm_90a", settings.with_options(mode="off")) for _ in range(3)]
    constants = toy.ToyConstants(value=4, seconds=0.3)
    threads = [threading.Thread(target=s.obtain, args=(constants,)) for s in services]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({folder for folder, _ in seen}) == 3
    assert {mode for _, mode in seen} == {0o700}
    assert [folder for folder, _ in seen if os.path.exists(folder)] == []


WRITER = """
from support.entries import entry, key
from muse_jit.store.layout import Layout
from muse_jit.store.lookup import Miss, Reason, read_entry
from muse_jit.store.publish import publish, set_aside
layout, who = Layout({root!r}), {who!r}
artifact = who.encode() * 100_000
reach()
end = time.monotonic() + 2.0
rounds = 0
while time.monotonic() < end:
    found = read_entry(layout, key().digest)
    set_aside(layout, key().digest, Miss(Reason.REPLACED, "", getattr(found, "inode", None)))
    publish(layout, entry(artifact=artifact, created_by=who), artifact)
    rounds += 1
print(rounds)
"""
READER = """
from support.entries import key
from muse_jit.store.layout import Layout
from muse_jit.store.lookup import Hit, read_entry
layout = Layout({root!r})
reach()
end = time.monotonic() + 2.0
seen = {{}}
while time.monotonic() < end:
    found = read_entry(layout, key().digest)
    if isinstance(found, Hit):
        what = found.entry.created_by if found.artifact == found.entry.created_by.encode() * 100_000 else "mixed"
    else:
        what = str(found.reason)
    seen[what] = seen.get(what, 0) + 1
print(seen)
"""


def test_a8_a12_manifest_and_artifact_always_come_from_one_build(tmp_path):
    """Two writers that replace one entry again and again, without locks, and two readers."""
    root = str(tmp_path / "cache")
    codes = [WRITER.format(root=root, who=who) for who in "ab"] + [READER.format(root=root)] * 2
    outputs = values(together(tmp_path, codes))
    assert min(int(rounds) for rounds in outputs[:2]) > 3
    seen = collections.Counter()
    for text in outputs[2:]:
        seen.update(eval(text))
    assert seen["a"] > 0
    assert seen["b"] > 0
    assert set(seen) <= {"a", "b", "absent"}


def test_a9_the_name_of_an_entry_is_its_key_and_nothing_else(tmp_path):
    """Whatever stands there already, and whoever writes."""
    for folder in ("one", "two"):
        layout = Layout(str(tmp_path / folder))
        for value in (3, 1, 2) if folder == "one" else (2, 3):
            publish(layout, entry(key(value)), bytes(range(256)) * 40)
    expected = [f"entries-v1/{key(v).digest[:2]}/{key(v).digest}/kernel.so" for v in (2, 3)]
    assert [n for n in _entries(tmp_path / "two") if n.endswith(".so")] == sorted(expected)
    assert set(_entries(tmp_path / "two")) < set(_entries(tmp_path / "one"))


def test_a11_a_replacement_is_a_new_file_and_the_old_one_stays_what_it_was(filled):
    service, constants = filled
    path = pathlib.Path(service.layout.entry(service.key_of(constants)[1].digest), "kernel.so")
    with path.open("rb") as old:
        before, artifact = os.fstat(old.fileno()), path.read_bytes()
        assert service.obtain(constants, force=True).status == "compiled"
        assert path.stat().st_ino != before.st_ino
        assert old.read() == artifact
        after = os.fstat(old.fileno())
        assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def test_a11_no_step_of_a_replacement_opens_a_published_file_for_writing(filled, monkeypatch):
    service, constants = filled
    opened = []
    real_open, real_file = os.open, builtins.open
    monkeypatch.setattr(os, "open", lambda p, f, *r, **n: opened.append((str(p), f)) or real_open(p, f, *r, **n))
    monkeypatch.setattr(
        builtins, "open", lambda p, mode="r", *r, **n: opened.append((str(p), mode)) or real_file(p, mode, *r, **n)
    )
    service.obtain(constants, force=True)
    monkeypatch.undo()
    writing = [
        p for p, f in opened if (re.search("[wax+]", f) if isinstance(f, str) else f & (os.O_WRONLY | os.O_RDWR))
    ]
    assert any("staging-v1" in p for p in writing)
    assert [p for p in writing if "entries-v1" in p] == []


def test_a17_a_slow_key_holds_up_no_other(tmp_path, settings):
    slow = (
        SERVICE
        + f"print(service().get(toy.ToyConstants(value=1, count_file={str(tmp_path / 'slow')!r}, seconds=60.0)))"
    )
    process = start(slow, block=NO_COMPILER, MUSE_JIT_WORKERS=4, **homes(settings))
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "slow").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        codes = [GET.format(count=str(tmp_path / "count"), values=[v]) for v in (2, 3)]
        outputs = values(together(tmp_path, codes, MUSE_JIT_WORKERS=4, **homes(settings)))
        assert outputs == ["[2]", "[3]"]
        assert process.poll() is None
    finally:
        process.kill()
        process.communicate()
    assert toy.compiles(tmp_path / "count") == 2


def test_a17_the_manifest_of_each_key_is_its_own(tmp_path, settings):
    count = tmp_path / "count"
    wanted = [1, 2, 3, 4]
    codes = [GET.format(count=str(count), values=[v]) for v in wanted]
    values(together(tmp_path, codes, **homes(settings)))
    service, toys = _toys(settings, count, wanted)
    for constants in toys:
        found = service.find(constants)
        assert found.entry.key["constants"]["value"] == constants.value
        assert found.entry.artifact_digest == content_digest(found.artifact)
        assert service.get(constants)() == constants.value


def test_a18_a_second_writer_of_a_damaged_entry_neither_warns_nor_fails(tmp_path):
    layout = Layout(str(tmp_path / "cache"))
    publish(layout, entry(), bytes(range(256)) * 40)
    pathlib.Path(layout.entry(key().digest), "kernel.so").write_bytes(b"")
    damaged = read_entry(layout, key().digest)
    assert set_aside(layout, key().digest, damaged) is not None
    assert set_aside(layout, key().digest, damaged) is None
    publish(layout, entry(created=1.0), bytes(range(256)) * 40)
    assert publish(layout, entry(created=2.0), bytes(range(256)) * 40).created == 1.0
    assert not isinstance(read_entry(layout, key().digest), Miss)
