"""How many compile workers this machine bears: usable CPUs and memory, as containers and batch systems limit them."""

import math
import os
from contextlib import suppress

WORKER_BYTES = 1 << 30
"""Memory one worker may take: the DSL's compiler is 0.4 GiB resident after an import and a compile, more for large
kernels."""

_NO_LIMIT = 1 << 60  # cgroup v1 writes a number near 2^63 for "no limit"


def worker_limit(cgroup: str = "/sys/fs/cgroup", proc: str = "/proc") -> int:
    """Compile workers at a time, at least one: CPUs by affinity and cgroup quota, memory by cgroup and what is free."""
    return max(1, min(usable_cpus(cgroup, proc), usable_bytes(cgroup, proc) // WORKER_BYTES))


def usable_cpus(cgroup: str = "/sys/fs/cgroup", proc: str = "/proc") -> int:
    """CPUs this process may use: its affinity, and the quota of its control group (v1 or v2), rounded up."""
    cpus = float(len(os.sched_getaffinity(0)))
    for folder in _folders(cgroup, proc, "cpu"):
        with suppress(OSError, ValueError, ZeroDivisionError):
            quota, period = _read(folder, "cpu.max").split()
            cpus = min(cpus, int(quota) / int(period)) if quota != "max" else cpus
        with suppress(OSError, ValueError, ZeroDivisionError):
            limit = int(_read(folder, "cpu.cfs_quota_us")) / int(_read(folder, "cpu.cfs_period_us"))
            cpus = min(cpus, limit) if limit > 0 else cpus
    return max(1, math.ceil(cpus))


def usable_bytes(cgroup: str = "/sys/fs/cgroup", proc: str = "/proc") -> int:
    """Memory that can still be taken: what the system has available, and what the control group leaves."""
    available = _NO_LIMIT
    with suppress(OSError, ValueError, IndexError):
        for line in _read(proc, "meminfo").splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    names = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
    for folder in _folders(cgroup, proc, "memory"):
        for limit, used in names:
            with suppress(OSError, ValueError):
                text = _read(folder, limit)
                if text != "max" and int(text) < _NO_LIMIT:
                    available = min(available, max(0, int(text) - int(_read(folder, used))))
    return available


def _folders(cgroup: str, proc: str, controller: str) -> list[str]:
    """The control group folders of this process and those around it, v2 and v1, for one controller."""
    found = [cgroup, os.path.join(cgroup, controller)]
    with suppress(OSError):
        for line in _read(proc, "self/cgroup").splitlines():
            _, _, rest = line.partition(":")
            controllers, _, path = rest.partition(":")
            if controllers == "":
                base = cgroup
            elif controller in controllers.split(","):
                base = os.path.join(cgroup, controllers)
            else:
                continue
            parts = [p for p in path.split("/") if p and p != ".."]
            found += [os.path.join(base, *parts[: n + 1]) for n in range(len(parts))]
    return found


def _read(folder: str, name: str) -> str:
    with open(os.path.join(folder, name), encoding="utf-8") as file:
        return file.read().strip()
