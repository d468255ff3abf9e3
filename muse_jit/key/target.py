"""What a kernel is compiled for: GPU architecture, CUDA major version, host CPU architecture."""

import ctypes
import dataclasses
import os
from typing import Any

from muse_jit.errors import TargetError

ARCHES = {(9, 0): "sm_90a", (10, 0): "sm_100a", (10, 3): "sm_103a", (12, 0): "sm_120a"}
"""Compute capability to the architecture that its kernels are compiled for."""

CUDA_MAJORS = (12, 13)
HOSTS = ("x86_64", "aarch64")
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR


@dataclasses.dataclass(frozen=True)
class Target:
    """One compilation target. An object file is host code around a cubin: both architectures belong to it."""

    arch: str
    """GPU architecture, such as "sm_90a"."""
    cuda: int
    """Major version of the CUDA toolkit whose compiler build is used: 12 or 13."""
    host: str
    """CPU architecture of the host code: "x86_64" or "aarch64"."""

    def __post_init__(self) -> None:
        check_arch(self.arch)
        if type(self.cuda) is not int or self.cuda not in CUDA_MAJORS:
            raise TargetError(f"CUDA major version {self.cuda!r}; allowed: 12, 13")
        if self.host not in HOSTS:
            raise TargetError(f"host architecture {self.host!r}; allowed: {', '.join(HOSTS)}")

    def as_dict(self) -> dict[str, str | int]:
        """Field name to value, as it enters the key."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        return f"{self.arch}, CUDA {self.cuda}, {self.host}"


def check_arch(arch: str) -> str:
    """`arch` itself when it is known.

    Raises:
        TargetError: naming the known architectures.
    """
    if arch not in ARCHES.values():
        raise TargetError(f"GPU architecture {arch!r}; allowed: {', '.join(ARCHES.values())}")
    return arch


def host_arch() -> str:
    """CPU architecture of this machine as the operating system names it."""
    return os.uname().machine


def arch_of_capability(capability: tuple[int, int]) -> str:
    """The architecture for a compute capability, (9, 0) for instance.

    Raises:
        TargetError: no kernel of this package is compiled for it.
    """
    try:
        return ARCHES[capability]
    except KeyError:
        known = ", ".join(f"{major}.{minor} ({arch})" for (major, minor), arch in ARCHES.items())
        raise TargetError(
            f"the device has compute capability {capability[0]}.{capability[1]}; supported: {known}"
        ) from None


def device_arch(ordinal: int = 0) -> str:
    """Ask the CUDA driver for the architecture of a visible device, without creating a context.

    Initialises the driver in this process: a caller that forks later should name its architecture instead.

    Raises:
        TargetError: there is no driver or no device, with what to do instead.
    """
    remedy = "name the architecture (--arch sm_90a on the command line, arch= in Python)"
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise TargetError(f"no GPU architecture was named and there is no CUDA driver to ask; {remedy}") from None
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    steps: tuple[tuple[Any, ...], ...] = (
        (driver.cuInit, 0),
        (driver.cuDeviceGet, ctypes.byref(device), ordinal),
        (driver.cuDeviceGetAttribute, ctypes.byref(major), _MAJOR, device),
        (driver.cuDeviceGetAttribute, ctypes.byref(minor), _MINOR, device),
    )
    for call, *arguments in steps:
        if code := call(*arguments):
            raise TargetError(
                f"no GPU architecture was named and the CUDA driver has no device {ordinal} (error {code}); {remedy}"
            )
    return arch_of_capability((major.value, minor.value))
