"""A cache filled under CPython 3.11 is hit by keys computed from the wheels for 3.12: the real wheels, downloaded."""

import pathlib
import subprocess
import sys
import zipfile

import pytest

from muse_jit.key.toolchain import identify

WHEELS = ("nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-base", "nvidia-cutlass-dsl-libs-core")
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_24_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")


def _download(folder, python, version, abi_version):
    names = [f"{name}=={version}" for name in (*WHEELS, "nvidia-cutlass-dsl-libs-cu13")]
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(folder)]
    command += ["--python-version", python, "--implementation", "cp"]
    for platform in PLATFORMS:
        command += ["--platform", platform]
    done = subprocess.run([*command, *names, f"apache-tvm-ffi=={abi_version}"], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"the wheels could not be downloaded: {done.stderr.strip().splitlines()[-1]}")


def _unpack(folder, site):
    """Install as an installer does, as far as identity looks: RECORD, the runtime library, the headers."""
    for wheel in pathlib.Path(folder).glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if ".dist-info/" in name or name.endswith(("c_api.h", "dlpack.h")):
                    archive.extract(name, site)


@pytest.mark.processes
def test_toolchain_identity_is_the_same_for_3_11_and_3_12(tmp_path):
    import importlib.metadata

    version = importlib.metadata.version("nvidia-cutlass-dsl")
    tvm_ffi = importlib.metadata.version("apache-tvm-ffi")
    digests = {}
    for python in ("3.11", "3.12"):
        _download(tmp_path / python, python, version, tvm_ffi)
        site = tmp_path / f"site-{python}"
        _unpack(tmp_path / python, site)
        digests[python] = identify(13, "x86_64", path=[str(site)]).digest
    assert digests["3.11"] == digests["3.12"] == identify(13, "x86_64").digest
