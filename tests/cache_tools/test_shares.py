"""Large caches are gone through by several processes: the sums are the same, whatever happens to a child."""

import dataclasses
import os
import signal

import pytest
from support import fixed

from cache_tools import shares, summary
from cache_tools.standing import Standings
from muse_jit.store.layout import Layout


@pytest.fixture
def cache(tmp_path):
    layout = fixed.fill(tmp_path / "cache")
    for value in range(100, 130):
        fixed.put(layout, fixed.key(value, arch=("sm_90a", "sm_100a")[value % 2]), age=value / 10, used=value / 20)
    return layout


def _sums(layout):
    found = dataclasses.asdict(summary.summarise(layout, Standings(layout)))
    for group in [found["total"], *found["kernels"].values(), *found["arches"].values(), *found["toolchains"].values()]:
        group["compile_seconds"] = round(group["compile_seconds"], 6)  # in another order, floats add up otherwise
    return found


@pytest.fixture
def alone(cache):
    return _sums(cache)


@pytest.mark.parametrize("processes", [2, 3, 8])
def test_the_sums_do_not_depend_on_the_number_of_processes(cache, alone, monkeypatch, processes):
    monkeypatch.setattr(summary, "processes_for", lambda layout: processes)
    assert _sums(cache) == alone


def test_a_small_cache_is_gone_through_alone_and_a_large_one_with_the_cpus(cache, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(4)))
    assert shares.processes_for(cache) == 1
    monkeypatch.setattr(shares, "_LARGE", 0)
    assert shares.processes_for(cache) == 4
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    assert shares.processes_for(cache) == 8


def _die(shards):
    if os.getpid() != _parent:
        os.kill(os.getpid(), signal.SIGKILL)
    return {"shards": list(shards)}


def _raise(shards):
    if os.getpid() != _parent:
        os.close(2)  # its traceback is not for this test's output
        raise RuntimeError
    return {"shards": list(shards)}


_parent = os.getpid()


@pytest.mark.parametrize("work", [_die, _raise])
def test_the_share_of_a_child_that_dies_is_gone_through_here(work):
    shards = tuple("abcdefg")
    found = shares.in_shares(shards, 3, work)
    assert sorted(s for part in found for s in part["shards"]) == list(shards)


def test_without_processes_all_is_done_here(monkeypatch):
    def refused():
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", refused)
    before = len(os.listdir("/proc/self/fd"))
    found = shares.in_shares(tuple("abc"), 3, lambda s: {"shards": list(s)})
    assert sorted(s for part in found for s in part["shards"]) == ["a", "b", "c"]
    assert len(os.listdir("/proc/self/fd")) == before


def test_no_child_is_left_behind(cache, monkeypatch):
    monkeypatch.setattr(summary, "processes_for", lambda layout: 4)
    summary.summarise(Layout(cache.root), Standings(cache))
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)
