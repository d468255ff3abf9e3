"""Control groups of both versions, laid out in a folder."""

import os

import pytest

from muse_jit.compiler.limits import WORKER_BYTES, usable_bytes, usable_cpus, worker_limit

GIB = 1 << 30


@pytest.fixture(autouse=True)
def _eight_cpus(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))


def _machine(tmp_path, files, cgroup="0::/\n", available=64 * GIB):
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self/cgroup").write_text(cgroup)
    (proc / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {available // 1024} kB\n")
    for name, text in files.items():
        (groups / name).parent.mkdir(parents=True, exist_ok=True)
        (groups / name).write_text(text)
    return str(groups), str(proc)


@pytest.mark.parametrize(
    ("files", "cgroup", "cpus"),
    [
        ({}, "", 8),
        ({"cpu.max": "max 100000\n"}, "0::/\n", 8),
        ({"cpu.max": "250000 100000\n"}, "0::/\n", 3),
        ({"pod/box/cpu.max": "100000 100000\n", "pod/cpu.max": "400000 100000\n"}, "0::/pod/box\n", 1),
        ({"pod/cpu.max": "200000 100000\n", "pod/box/cpu.max": "max 100000\n"}, "0::/pod/box\n", 2),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, "4:cpu,cpuacct:/\n", 8),
        ({"cpu/cpu.cfs_quota_us": "150000\n", "cpu/cpu.cfs_period_us": "100000\n"}, "4:cpu,cpuacct:/\n", 2),
        (
            {"cpu,cpuacct/a/cpu.cfs_quota_us": "50000\n", "cpu,cpuacct/a/cpu.cfs_period_us": "100000\n"},
            "4:cpu,cpuacct:/a\n",
            1,
        ),
        ({"cpu.max": "garbage\n"}, "0::/\n", 8),
    ],
)
def test_cpus(tmp_path, files, cgroup, cpus):
    assert usable_cpus(*_machine(tmp_path, files, cgroup)) == cpus


@pytest.mark.parametrize(
    ("files", "available", "usable"),
    [
        ({}, 64 * GIB, 64 * GIB),
        ({"memory.max": "max\n", "memory.current": "1\n"}, 64 * GIB, 64 * GIB),
        ({"memory.max": f"{4 * GIB}\n", "memory.current": f"{GIB}\n"}, 64 * GIB, 3 * GIB),
        ({"memory.max": f"{4 * GIB}\n", "memory.current": f"{5 * GIB}\n"}, 64 * GIB, 0),
        ({"memory.max": f"{80 * GIB}\n", "memory.current": "0\n"}, 64 * GIB, 64 * GIB),
        ({"memory/memory.limit_in_bytes": f"{2 * GIB}\n", "memory/memory.usage_in_bytes": "0\n"}, 64 * GIB, 2 * GIB),
        ({"memory/memory.limit_in_bytes": f"{2**63 - 4096}\n", "memory/memory.usage_in_bytes": "0\n"}, GIB, GIB),
    ],
)
def test_memory(tmp_path, files, available, usable):
    assert usable_bytes(*_machine(tmp_path, files, available=available)) == usable


def test_workers_are_bounded_by_both_and_at_least_one(tmp_path):
    assert worker_limit(*_machine(tmp_path / "a", {})) == 8
    assert worker_limit(*_machine(tmp_path / "b", {}, available=3 * WORKER_BYTES + 5)) == 3
    assert worker_limit(*_machine(tmp_path / "c", {}, available=10)) == 1
