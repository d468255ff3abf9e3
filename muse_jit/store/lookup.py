"""Step 3 of the path: look a key up. The answer is a value, `Hit` or `Miss` with a reason, never an exception.

The artifact is read once; its size and digest are checked on the bytes that are handed on for loading. The stored
key is compared with the asked one, whole. No link below the cache folder is followed.
"""

import dataclasses
import enum
import errno
import os
import stat

from muse_jit.key.encoding import KeyDigest, content_digest
from muse_jit.key.kernel_key import KernelKey, symbol_of
from muse_jit.store.entry import SCHEMA, BadManifest, Entry
from muse_jit.store.layout import ARTIFACT, MANIFEST, Layout

_MAX_BYTES = 1 << 30  # nothing this package publishes comes near; a larger file is not read into memory


class Reason(enum.StrEnum):
    """Why a look-up is a miss."""

    ABSENT = "absent"
    """There is no such entry."""
    INCOMPLETE = "incomplete"
    """The entry's folder is there but one of its files is not."""
    TRUNCATED = "truncated"
    """kernel.so has another size than the manifest says."""
    BAD_DIGEST = "bad_digest"
    """The bytes of kernel.so are not the published ones."""
    BAD_MANIFEST = "bad_manifest"
    """entry.json cannot be understood."""
    WRONG_SCHEMA = "wrong_schema"
    """entry.json is of another schema version."""
    FOREIGN_KEY = "foreign_key"
    """The entry is of another key than the one asked for."""
    UNREADABLE = "unreadable"
    """The operating system refused to read it."""
    UNTRUSTED = "untrusted"
    """The entry or the cache folder is owned or writable by somebody else, or a link stands in the way."""
    UNLOADABLE = "unloadable"
    """The bytes are the published ones and cannot be opened (found by the loader)."""
    DISABLED = "disabled"
    """The disk cache is off."""
    REPLACED = "replaced"
    """The entry is fine and was asked to be built anew."""


TO_SET_ASIDE = frozenset(
    {
        Reason.INCOMPLETE,
        Reason.TRUNCATED,
        Reason.BAD_DIGEST,
        Reason.BAD_MANIFEST,
        Reason.FOREIGN_KEY,
        Reason.UNLOADABLE,
        Reason.REPLACED,
    }
)
"""Reasons for which what is there is moved aside before the newly built entry takes its place."""


@dataclasses.dataclass(frozen=True)
class Hit:
    """A verified entry with the very bytes that were verified."""

    entry: Entry
    artifact: bytes
    inode: int | None = None
    """Inode of the entry's folder; None for a kernel that was just built."""
    last_used: float | None = None
    """Seconds since the epoch, exact to a day; None for a kernel that was just built or just pruned."""


@dataclasses.dataclass(frozen=True)
class Miss:
    """No usable entry. `inode` is that of the entry's folder when there is one: only it may be set aside."""

    reason: Reason
    detail: str = ""
    inode: int | None = None


PASSING = (errno.ESTALE, errno.EBUSY, errno.EINTR)
"""What network file systems answer now and then, and not the next time."""

_TRIES = 3


class _Unfit(Exception):
    def __init__(self, reason: Reason, detail: str, code: int | None = None) -> None:
        super().__init__(detail)
        self.reason = reason
        self.passing = code in PASSING


def find(layout: Layout, key: KernelKey) -> Hit | Miss:
    """Look up one key. Reads two files, takes no lock, writes nothing, raises nothing."""
    return read_entry(layout, key.digest, key)


def read_entry(layout: Layout, digest: KeyDigest, asked: KernelKey | None = None) -> Hit | Miss:
    """Read and verify what is stored under a digest; without `asked` no key is compared (the tools have none)."""
    result: Hit | Miss = Miss(Reason.ABSENT)
    for _ in range(_TRIES):
        inode = None
        try:
            _check_owner(os.stat(layout.root), layout.root)
            folder = layout.open_entry(digest)
            try:
                inode = os.fstat(folder).st_ino
                return _read(folder, digest, inode, asked)
            finally:
                os.close(folder)
        except _Unfit as unfit:
            result = Miss(unfit.reason, str(unfit), inode)
            if not unfit.passing:
                break
        except OSError as error:
            if inode is None and error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                return _no_folder(layout.entry(digest))
            reason = Reason.UNTRUSTED if error.errno == errno.ELOOP else Reason.UNREADABLE
            result = Miss(reason, f"{error.strerror} ({layout.entry(digest)})", inode)
            if error.errno not in PASSING:
                break
    return result


def read_manifest(layout: Layout, digest: KeyDigest) -> Entry | Miss:
    """The manifest alone, without reading the artifact: enough for listing."""
    try:
        folder = layout.open_entry(digest)
    except OSError as error:
        return Miss(Reason.UNREADABLE, f"{error.strerror} ({layout.entry(digest)})")
    try:
        return manifest_in(folder, digest)
    finally:
        os.close(folder)


def manifest_in(folder: int, digest: KeyDigest) -> Entry | Miss:
    """`read_manifest` for the descriptor of an entry's folder, for who goes through many."""
    try:
        return _manifest(folder, digest)
    except _Unfit as unfit:
        return Miss(unfit.reason, str(unfit))


def _no_folder(path: str) -> Miss:
    """Nothing there, or something else than a folder, which must be moved for an entry to take its place."""
    try:
        status = os.lstat(path)
    except OSError:
        return Miss(Reason.ABSENT)
    if stat.S_ISDIR(status.st_mode):  # it came in the meantime, or a folder above it is a link
        return Miss(Reason.ABSENT)
    return Miss(Reason.UNTRUSTED, f"{path} is not a folder", status.st_ino)


def _read(folder: int, digest: KeyDigest, inode: int, asked: KernelKey | None) -> Hit:
    entry = _manifest(folder, digest, asked)
    artifact = _bytes_of(folder, ARTIFACT)
    if len(artifact) != entry.artifact_size:
        raise _Unfit(Reason.TRUNCATED, f"{ARTIFACT} has {len(artifact)} bytes, published were {entry.artifact_size}")
    if content_digest(artifact) != entry.artifact_digest:
        raise _Unfit(Reason.BAD_DIGEST, f"the bytes of {ARTIFACT} are not the published ones")
    try:
        last_used = os.stat(MANIFEST, dir_fd=folder, follow_symlinks=False).st_mtime
    except FileNotFoundError:  # pruned this very moment; the bytes are whole and verified
        last_used = None
    return Hit(entry, artifact, inode, last_used)


def _manifest(folder: int, digest: KeyDigest, asked: KernelKey | None = None) -> Entry:
    data = _bytes_of(folder, MANIFEST)
    try:
        entry = Entry.from_json(data, asked)
    except BadManifest as error:
        other = error.schema is not None and error.schema != SCHEMA
        raise _Unfit(Reason.WRONG_SCHEMA if other else Reason.BAD_MANIFEST, f"{MANIFEST}: {error}") from None
    if asked is not None and entry.key_text != asked.text:
        from muse_jit.key.difference import difference  # only here

        parts = "; ".join(map(str, difference(entry.key, asked.document)[:3]))
        raise _Unfit(Reason.FOREIGN_KEY, f"the stored key differs: {parts}")
    if entry.digest != digest:
        raise _Unfit(Reason.FOREIGN_KEY, f"{MANIFEST} is of the key {entry.digest[:12]}")
    if entry.symbol != symbol_of(digest):
        raise _Unfit(Reason.BAD_MANIFEST, f"{MANIFEST}: symbol {entry.symbol[:40]!a} is not that of the key")
    return entry


def _bytes_of(folder: int, name: str) -> bytes:
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=folder)
    except FileNotFoundError:
        raise _Unfit(Reason.INCOMPLETE, f"{name} is missing") from None
    except OSError as error:
        reason = Reason.UNTRUSTED if error.errno == errno.ELOOP else Reason.UNREADABLE
        raise _Unfit(reason, f"{name}: {error.strerror}", error.errno) from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise _Unfit(Reason.UNTRUSTED, f"{name} is not a regular file")
        _check_owner(status, name)
        if status.st_size > _MAX_BYTES:
            raise _Unfit(Reason.TRUNCATED, f"{name} has {status.st_size} bytes, which nothing published has")
        return _read_all(descriptor, status.st_size, name)
    finally:
        os.close(descriptor)


def _read_all(descriptor: int, size: int, name: str) -> bytes:
    """What is in a file; one call for the files of this cache, which are whole before they can be seen."""
    try:
        data = os.read(descriptor, size + 1)
        if len(data) == size:
            return data
        with open(descriptor, "rb", closefd=False) as file:
            return data + file.read()
    except OSError as error:
        raise _Unfit(Reason.UNREADABLE, f"{name}: {error.strerror}", error.errno) from None


def _check_owner(status: os.stat_result, name: str) -> None:
    if status.st_uid not in (os.geteuid(), 0):
        raise _Unfit(Reason.UNTRUSTED, f"{name} belongs to user id {status.st_uid}")
    if status.st_mode & 0o022:
        raise _Unfit(Reason.UNTRUSTED, f"{name} can be written by others (mode {stat.S_IMODE(status.st_mode):04o})")
