"""Kind K: growth, pruning, and deletion under use."""

import os
import pathlib
import shutil
import threading

import pytest
from support import toy
from support.entries import ARTIFACT, entry, key
from support.process import start

from muse_jit.service import JitService
from muse_jit.settings import Settings
from muse_jit.store.layout import Layout
from muse_jit.store.listing import digests
from muse_jit.store.lookup import Hit, Miss, find
from muse_jit.store.prune import prune, usages
from muse_jit.store.publish import publish

pytestmark = pytest.mark.processes


def _service(cache, **options):
    return JitService("sm_90a", Settings().with_options(cache_dir=str(cache), **options))


def test_k2_loading_while_others_prune_gives_a_kernel_and_never_an_error(tmp_path):
    cache = tmp_path / "cache"
    _service(cache).obtain(toy.ToyConstants(value=0))
    pruner = start(
        "from muse_jit.store.layout import Layout\nfrom muse_jit.store.prune import prune\n"
        f"layout = Layout({str(cache)!r})\n"
        "print('started', flush=True)\n"
        "while True: prune(layout, max_bytes=0)"
    )
    assert pruner.stdout.readline() == "started\n"
    try:
        for turn in range(12):
            service = _service(cache)
            assert service.get(toy.ToyConstants(value=turn % 3))() == turn % 3
    finally:
        pruner.kill()
        pruner.communicate()


def test_k2_a_reader_finds_an_entry_whole_or_not_at_all(tmp_path):
    layout = Layout(str(tmp_path / "cache"))
    stop = threading.Event()

    def publish_and_prune():
        while not stop.is_set():
            publish(layout, entry(), ARTIFACT)
            prune(layout, max_bytes=0)

    thread = threading.Thread(target=publish_and_prune)
    thread.start()
    seen = set()
    try:
        for _ in range(3000):
            found = find(layout, key())
            seen.add("hit" if isinstance(found, Hit) else str(found.reason))
            if isinstance(found, Hit):
                assert found.artifact == ARTIFACT
    finally:
        stop.set()
        thread.join()
    # "incomplete" is a reader that opened the folder just before it was deleted: a miss, and nothing else.
    assert seen <= {"hit", "absent", "incomplete"}


def test_k3_the_folder_deleted_at_any_time_is_made_again(tmp_path):
    cache = tmp_path / "cache"
    service = _service(cache)
    assert service.get(toy.ToyConstants(value=1))() == 1
    shutil.rmtree(cache)
    assert service.get(toy.ToyConstants(value=2))() == 2
    assert isinstance(_service(cache).find(toy.ToyConstants(value=2)), Hit)


def test_k3_deleted_in_the_middle_of_a_compile(tmp_path):
    cache, count = tmp_path / "cache", tmp_path / "count"
    constants = toy.ToyConstants(value=3, seconds=1.0, count_file=str(count))
    service = _service(cache)
    results = []
    thread = threading.Thread(target=lambda: results.append(service.get(constants)()))
    thread.start()
    while not count.exists():
        pass
    shutil.rmtree(cache)
    thread.join()
    assert results == [3]
    assert isinstance(_service(cache).find(constants), Hit)


def test_k1_k4_pruners_at_the_same_time_end_at_the_cap(tmp_path):
    layout = Layout(str(tmp_path / "cache"))
    for value in range(60):
        publish(layout, entry(key(value)), ARTIFACT)
        stamp = 1e9 + value
        os.utime(os.path.join(layout.entry(key(value).digest), "entry.json"), (stamp, stamp))
    size = usages(layout)[0].size
    cap = 20 * size
    code = (
        "from muse_jit.store.layout import Layout\nfrom muse_jit.store.prune import prune\n"
        f"prune(Layout({layout.root!r}), max_bytes={cap})"
    )
    processes = [start(code) for _ in range(3)]
    assert [p.communicate(timeout=60)[1] for p in processes] == ["", "", ""]
    prune(layout, max_bytes=cap)
    left = set(digests(layout))
    assert left == {key(value).digest for value in range(40, 60)}
    assert sum(u.size for u in usages(layout)) == cap


def test_k6_obtaining_many_kernels_keeps_none_in_memory(tmp_path):
    """`get` keeps a kernel for each constant set, by design: a decode step holds on to all of them. A warm-up, which
    may go through thousands, keeps nothing."""
    import gc

    from muse_jit.store.lookup import Hit as HitClass

    service = _service(tmp_path / "cache")
    for value in range(3):
        service.obtain(toy.ToyConstants(value=value))
    for _ in range(300):
        for value in range(3):
            service.obtain(toy.ToyConstants(value=value))
    gc.collect()
    assert sum(type(o) is HitClass for o in gc.get_objects()) == 0
    assert (service._memory, service._building) == ({}, {})


def test_k7_litter_of_killed_builders_goes_with_the_next_publish_and_live_staging_stays(tmp_path):
    service = _service(tmp_path / "cache")
    service.layout.create()
    staging = pathlib.Path(service.layout.root, "staging-v1")
    for name, age in (("dead", 7200), ("live", 10)):
        (staging / name).mkdir(parents=True)
        stamp = __import__("time").time() - age
        os.utime(staging / name, (stamp, stamp))
    service.obtain(toy.ToyConstants())
    assert [p.name for p in staging.iterdir()] == ["live"]


def test_c6_strays_and_half_entries_block_neither_writes_nor_pruning_nor_listing(tmp_path):
    service = _service(tmp_path / "cache")
    constants = toy.ToyConstants(value=1)
    digest = service.key_of(constants)[1].digest
    half = pathlib.Path(service.layout.entry(digest))
    half.mkdir(parents=True)
    (half / "kernel.so").write_bytes(b"half")
    for stray in ("entries-v1/zz", "entries-v1/ab/x.tmp", "staging-v1/file", "set-aside-v1/file", "locks-v1/file"):
        path = pathlib.Path(service.layout.root, stray)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("stray")
    assert service.get(constants)() == 1
    assert isinstance(service.find(constants), Hit)
    assert not isinstance(prune(service.layout, max_bytes=0), Miss)
    assert list(digests(service.layout)) == []
    assert service.get(toy.ToyConstants(value=2))() == 2
