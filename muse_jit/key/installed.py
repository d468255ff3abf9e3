"""Find installed distributions and their file hashes without importing them, or importlib.metadata.

Only directories of `sys.path` are listed. (Importing `importlib.metadata` costs 14 ms, a fifth of what a whole warm
start may take; its RECORD reader is two lines.)
"""

import base64
import dataclasses
import hashlib
import os
import re
import sys
from collections.abc import Iterator

_DIST_INFO = re.compile(r"(?P<name>[A-Za-z0-9_.]+)-(?P<version>[^-]+)\.dist-info")


@dataclasses.dataclass(frozen=True)
class Distribution:
    """One installed distribution: normalised name, version, and where its files lie."""

    name: str
    version: str
    root: str
    """The folder its RECORD's paths are relative to (site-packages)."""
    info: str
    """Path of its .dist-info folder."""

    def path(self, relative: str) -> str:
        """Absolute path of one of its files."""
        return os.path.join(self.root, relative)

    def record(self) -> bytes | None:
        """The bytes of its RECORD; None where there is none."""
        try:
            with open(os.path.join(self.info, "RECORD"), "rb") as file:
                return file.read()
        except OSError:
            return None

    def recorded_hashes(self, record: bytes | None = None) -> dict[str, str] | None:
        """Relative path to "sha256=..." as RECORD gives it; None where there is no RECORD.

        `record` are its bytes, where they have been read.
        """
        record = self.record() if record is None else record
        if record is None:
            return None
        rows = [line.rsplit(",", 2) for line in record.decode("utf-8").splitlines()]
        return {row[0]: row[1] for row in rows if len(row) == 3 and row[1]}

    def installed_hashes(self, relatives: Iterator[str] | list[str]) -> dict[str, str]:
        """The same mapping from the installed bytes; a file that is not there is left out."""
        return {r: digest for r in relatives if (digest := file_hash(self.path(r))) is not None}


def file_hash(path: str) -> str | None:
    """ "sha256=..." of a file in RECORD's spelling (URL-safe base64 without padding); None if it cannot be read."""
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    except OSError:
        return None
    return "sha256=" + base64.urlsafe_b64encode(digest.digest()).rstrip(b"=").decode()


def distributions(prefixes: tuple[str, ...], path: list[str] | None = None) -> dict[str, Distribution]:
    """Installed distributions whose normalised name begins with one of `prefixes`; the first on `path` wins.

    Names are normalised as in PEP 503 ("nvidia-cutlass-dsl-libs-cu13").
    """
    found: dict[str, Distribution] = {}
    for root in sys.path if path is None else path:
        try:
            names = sorted(os.listdir(root or "."))
        except OSError:
            continue
        for entry in names:
            match = _DIST_INFO.fullmatch(entry)
            if match is None:
                continue
            name = re.sub(r"[-_.]+", "-", match["name"]).lower()
            if name.startswith(prefixes) and name not in found:
                root = os.path.abspath(root)
                found[name] = Distribution(name, match["version"], root, os.path.join(root, entry))
    return found
