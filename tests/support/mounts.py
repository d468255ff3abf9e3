"""Small file systems for tests: limited in size or inodes, read-only, noexec. Root only."""

import contextlib
import os
import subprocess

import pytest


@contextlib.contextmanager
def tmpfs(path, options):
    """A tmpfs mounted at `path` (made if need be) for the time of the block; skips where mounting is not possible."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    os.makedirs(path, exist_ok=True)
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"tmpfs cannot be mounted here: {done.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def remount(path, options):
    """Change the options of a mounted file system."""
    subprocess.run(["mount", "-o", f"remount,{options}", str(path)], check=True)
