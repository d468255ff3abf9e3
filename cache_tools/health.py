"""What `doctor` asks of the cache folder and its file system. Each check says what it found and what to do about it.

What the cache needs of a file system is tried, not looked up: a lock that excludes, a rename of a folder that appears
whole and never replaces a full one, and memory that may be executed. The trial happens in a private folder below
staging, where a killed doctor's leftovers are swept as a killed builder's are.
"""

import dataclasses
import errno
import fcntl
import mmap
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import suppress

from muse_jit.console import size_text
from muse_jit.errors import CacheUnusable
from muse_jit.settings import Settings
from muse_jit.store.layout import ENTRIES, LOCKS, SET_ASIDE, STAGING, Layout

OK, WARN, FAIL = "ok", "warn", "fail"

_NETWORK = ("nfs", "cifs", "smb", "lustre", "gpfs", "ceph", "fuse", "9p", "beegfs", "afs", "glusterfs", "virtiofs")
_SPACE_FAIL, _SPACE_WARN = 16 << 20, 1 << 30
_INODES_FAIL, _INODES_WARN = 100, 10_000


@dataclasses.dataclass(frozen=True)
class Check:
    """One line of the doctor."""

    name: str
    status: str
    """ok, warn or fail."""
    message: str
    remedy: str = ""
    """What to do; empty where nothing is to be done."""


def folder_checks(layout: Layout, origin: str, settings: Settings) -> Iterator[Check]:
    """The checks of the cache folder, in the order in which one makes sense after the other."""
    root = layout.root
    if settings.mode == "off":
        yield Check("setting", WARN, "MUSE_JIT_MODE is off: the cache is not used", "unset MUSE_JIT_MODE")
    try:
        there = os.stat(root)
    except OSError as error:
        yield _not_there(root, origin, error)
        parent = _existing(root)
        yield _file_system(parent)
        yield from _room(parent, settings)
        yield _executable()
        return
    if not stat.S_ISDIR(there.st_mode):
        yield Check("folder", FAIL, f"{root} is not a folder", "name another with MUSE_JIT_CACHE_DIR")
        return
    yield Check("folder", OK, f"{root} ({origin})")
    yield _owner(root, there)
    yield _mode(layout, there)
    yield _links(layout)
    yield _file_system(root)
    yield from _trial(layout, settings)
    yield from _room(root, settings)
    yield _executable()


def _not_there(root: str, origin: str, error: OSError) -> Check:
    if error.errno != errno.ENOENT:
        return Check("folder", FAIL, f"{root}: {error.strerror}", "name another with MUSE_JIT_CACHE_DIR")
    parent = _existing(root)
    if os.access(parent, os.W_OK | os.X_OK):
        return Check("folder", WARN, f"{root} ({origin}) is not there yet", "nothing, or fill it: muse-jit warmup")
    return Check("folder", FAIL, f"{root} ({origin}) is not there and {parent} cannot be written by this user",
                 "name another with MUSE_JIT_CACHE_DIR")  # fmt: skip


def _existing(path: str) -> str:
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    return path


def _owner(root: str, there: os.stat_result) -> Check:
    me = os.geteuid()
    if there.st_uid == me:
        return Check("owner", OK, f"user id {me}, this user")
    if there.st_uid == 0:
        return Check("owner", OK, "root: its kernels are used; only root can add some")
    return Check("owner", FAIL, f"user id {there.st_uid}, not this user ({me}) nor root, and code is loaded from here",
                 "name a folder of your own with MUSE_JIT_CACHE_DIR")  # fmt: skip


def _mode(layout: Layout, there: os.stat_result) -> Check:
    mode = stat.S_IMODE(there.st_mode)
    if mode & 0o022:
        return Check("mode", FAIL, f"{mode:04o}: others can write to it, and code is loaded from here",
                     f"chmod go-w {layout.root}")  # fmt: skip
    if mode & layout.dir_mode != layout.dir_mode:
        return Check("mode", WARN, f"{mode:04o}, narrower than MUSE_JIT_SHARE={layout.share} asks for",
                     f"chmod {layout.dir_mode:o} {layout.root}")  # fmt: skip
    return Check("mode", OK, f"{mode:04o}")


def _links(layout: Layout) -> Check:
    """Only the root may be reached through a link: below it none is followed, so nothing behind one is ever found."""
    links = [n for n in (ENTRIES, LOCKS, STAGING, SET_ASIDE) if os.path.islink(os.path.join(layout.root, n))]
    if links:
        return Check("links", FAIL, f"{', '.join(links)} is a link, and none below the folder is followed",
                     f"link {layout.root} itself, or set MUSE_JIT_CACHE_DIR")  # fmt: skip
    return Check("links", OK, "none below the folder")


def _file_system(path: str) -> Check:
    kind, options = _mount_of(path)
    shown = f"{kind} ({options})"
    if kind.startswith(_NETWORK):
        return Check("file system", WARN, f"{shown}: over the network each host compiles a key once, not all together",
                     "a local folder, if start-up is slow")  # fmt: skip
    if kind in ("tmpfs", "ramfs"):
        return Check("file system", WARN, f"{shown}: in memory, gone after a restart", "a folder on a disk, to keep it")
    return Check("file system", OK, shown)


def _mount_of(path: str) -> tuple[str, str]:
    """Type and options of the mount that a path lies on."""
    best, found = "", ("unknown", "")
    real = os.path.realpath(path)
    with suppress(OSError), open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            before, _, after = line.rstrip("\n").partition(" - ")
            fields, kind = before.split(" "), after.split(" ")
            if len(fields) < 6 or not kind:
                continue
            point = fields[4].encode("utf-8", "surrogateescape").decode("unicode_escape", "replace")
            inside = real == point or real.startswith(point.rstrip("/") + "/")
            if inside and len(point) >= len(best):  # of equal ones the last was mounted on top
                best, found = point, (kind[0], fields[5])
    return found


def _trial(layout: Layout, settings: Settings) -> Iterator[Check]:
    """Lock and rename, tried in a folder that goes again."""
    folder = layout.unique(STAGING)
    try:
        layout.check_trust()
        layout.make_parents(folder)
        layout.make_folder(folder)
    except CacheUnusable:
        return  # owner or mode said so
    except OSError as error:
        message = f"not possible ({error.strerror}): what is there is used, the rest compiled by each process"
        if settings.mode == "readonly":
            yield Check("writing", OK, message)
        else:
            yield Check("writing", WARN, message, "a folder that this user can write, or MUSE_JIT_MODE=readonly")
        return
    try:
        yield _lock(os.path.join(folder, "lock"))
        yield _rename(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _lock(path: str) -> Check:
    remedy = "a local folder; without locks every process compiles for itself"
    first = second = -1
    try:
        first = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        second = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return Check("lock", OK, "flock excludes")
        return Check("lock", FAIL, "flock lets two holders in at once", remedy)
    except OSError as error:
        return Check("lock", WARN, f"no flock here ({error.strerror}); a slower lock by files is used", remedy)
    finally:
        for descriptor in (first, second):
            if descriptor >= 0:
                os.close(descriptor)


def _rename(folder: str) -> Check:
    """A folder appears whole by one rename, and a second one does not replace it."""
    remedy = "a folder on another file system"
    a, b, target = (os.path.join(folder, name) for name in ("a", "b", "target"))
    try:
        for path in (a, b):
            os.mkdir(path)
            with open(os.path.join(path, "file"), "w", encoding="utf-8") as file:
                file.write(path)
        os.rename(a, target)
        try:
            os.rename(b, target)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                return Check("rename", OK, "a folder appears by one rename and replaces no other")
            raise
        return Check("rename", FAIL, "a rename replaced a folder that was not empty", remedy)
    except OSError as error:
        return Check("rename", FAIL, f"a folder cannot be renamed: {error.strerror}", remedy)


def _room(path: str, settings: Settings) -> Iterator[Check]:
    try:
        status = os.statvfs(path)
    except OSError as error:
        yield Check("space", WARN, f"not known: {error.strerror}")
        return
    free = status.f_bavail * status.f_frsize
    level = FAIL if free < _SPACE_FAIL else WARN if free < _SPACE_WARN else OK
    remedy = "muse-cache prune --max-size, or a larger disk" if level != OK else ""
    yield Check(
        "space", level, f"{size_text(free)} free; the cache may grow to {size_text(settings.max_bytes)}", remedy
    )
    if status.f_files == 0:
        yield Check("inodes", OK, "as many as there is space for")
        return
    level = FAIL if status.f_favail < _INODES_FAIL else WARN if status.f_favail < _INODES_WARN else OK
    remedy = "muse-cache prune --older-than 30d, or another disk" if level != OK else ""
    yield Check("inodes", level, f"{status.f_favail:,} free; an entry takes three and its lock one", remedy)


def _executable() -> Check:
    """Kernels are opened from memory, so a cache mounted noexec works; a system that forbids such memory does not."""
    try:
        descriptor = os.memfd_create("muse_jit-doctor", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, mmap.PAGESIZE)
            mmap.mmap(descriptor, mmap.PAGESIZE, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC).close()
        finally:
            os.close(descriptor)
    except OSError as error:
        return Check("exec", FAIL, f"memory of this process may not be executed ({error.strerror}), and kernels are "
                     "opened from it", "allow executable memory files: sysctl vm.memfd_noexec=0")  # fmt: skip
    return Check("exec", OK, "kernels can be opened from memory, also where the folder is mounted noexec")
