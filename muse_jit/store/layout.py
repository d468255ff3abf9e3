"""The cache folder on disk: the only place where its paths and format versions are written down.

    ROOT/                                    $MUSE_JIT_CACHE_DIR, or a default (see `default_root`)
      README  CACHEDIR.TAG                   the folder explains itself; backup programs skip it
      toolchain.json                         the toolchains it was filled with
      memo.json                              digests of sources and installed files, by their content
      entries-v1/ab/<key digest>/            one entry: kernel.so and entry.json, appear together by one rename
      locks-v1/ab/<key digest>.lock          lock of one key, with a record of its holder for those who wait;
                                             never unlinked while anyone may hold it
      locks-v1/ab/<key digest>.takeover.lock taken by the one waiter that compiles past a stalled holder
      locks-v1/prune.lock                    one pruner at a time
      locks-v1/toolchain.lock                one writer of toolchain.json at a time
      locks-v1/workers-<host>/<n>.lock       one for each compile worker that may run on a host
      staging-v1/<unique>/                   private to one builder
      set-aside-v1/<key digest>-<unique>/    damaged entries and logs of failed compiles, kept to look at

"ab" are the first two digits of the digest. File names never contain a kernel's name, so they stay below 140 bytes
whatever a kernel is called. An entry is three inodes: its folder and two files.
"""

import dataclasses
import os
import stat
from contextlib import suppress

from muse_jit.errors import CacheUnusable
from muse_jit.key.encoding import KeyDigest

ENTRIES, LOCKS, STAGING, SET_ASIDE = "entries-v1", "locks-v1", "staging-v1", "set-aside-v1"
ARTIFACT, MANIFEST, TOOLCHAINS, MEMO = "kernel.so", "entry.json", "toolchain.json", "memo.json"

_MODES = {"owner": (0o700, 0o600), "group": (0o750, 0o640), "all": (0o755, 0o644)}
_README = (
    "Compiled GPU kernels, kept by muse_jit. `muse-cache ls` lists them.\n"
    "The folder may be deleted at any time: what is missing is compiled again.\n"
)
_CACHEDIR_TAG = (
    "Signature: 8a477f597d28d172789f06886806bc55\n"
    "# This file marks a cache folder of muse_jit; see https://bford.info/cachedir/\n"
)


def default_root(cache_dir: str | None, vllm_cache_root: str | None) -> tuple[str, str]:
    """The cache folder and why it is that one.

    In this order: an explicit folder; muse_jit below vLLM's cache root; the user's cache folder; and, where there is
    neither HOME nor a passwd entry, a folder of this user id below /var/tmp. Never the current folder.
    """
    if cache_dir:
        return os.path.abspath(cache_dir), "cache_dir"
    if vllm_cache_root:
        return os.path.join(os.path.abspath(vllm_cache_root), "muse_jit"), "VLLM_CACHE_ROOT"
    try:
        import platformdirs  # only when no folder was named: 8 ms, and it asks for the home folder

        path = platformdirs.user_cache_dir("muse_jit", appauthor=False)
        if os.path.isabs(path):
            return path, "user cache folder"
    except (ImportError, KeyError, OSError, RuntimeError):
        pass  # no HOME and an unknown user id (platformdirs raises), as in many containers
    return f"/var/tmp/muse_jit-{os.getuid()}", "no home folder"


def flush_folder(path: str) -> None:
    """Flush a folder's names to disk; a file system that refuses is let be, the rename holds without it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclasses.dataclass(frozen=True)
class Layout:
    """The paths below one root, and how folders and files in it are made."""

    root: str
    share: str = "owner"

    @property
    def dir_mode(self) -> int:
        """Mode of folders, by MUSE_JIT_SHARE."""
        return _MODES[self.share][0]

    @property
    def file_mode(self) -> int:
        """Mode of files, locks included."""
        return _MODES[self.share][1]

    @property
    def entries(self) -> str:
        """The folder of all entries."""
        return os.path.join(self.root, ENTRIES)

    @property
    def locks(self) -> str:
        """The folder of all locks."""
        return os.path.join(self.root, LOCKS)

    @property
    def toolchains(self) -> str:
        """Path of toolchain.json."""
        return os.path.join(self.root, TOOLCHAINS)

    @property
    def memo(self) -> str:
        """Path of memo.json."""
        return os.path.join(self.root, MEMO)

    def entry(self, digest: KeyDigest) -> str:
        """The folder of one entry."""
        return os.path.join(self.root, ENTRIES, digest[:2], digest)

    def open_entry(self, digest: KeyDigest) -> int:
        """A descriptor of an entry's folder. Only the root may be reached through links; below it none is followed.

        Raises:
            OSError: it is not there, or cannot be opened; ELOOP or ENOTDIR for a link.
        """
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        folder = os.open(self.root, flags)
        for name in (ENTRIES, digest[:2], digest):
            try:
                inner = os.open(name, flags | os.O_NOFOLLOW, dir_fd=folder)
            finally:
                os.close(folder)
            folder = inner
        return folder

    def lock(self, digest: KeyDigest, kind: str = "lock") -> str:
        """A lock file of one key; `kind` is "lock" or "takeover.lock"."""
        return os.path.join(self.root, LOCKS, digest[:2], f"{digest}.{kind}")

    def unique(self, kind: str, prefix: str = "") -> str:
        """A path below staging or set-aside that no process on any host uses: 128 random bits name it."""
        return os.path.join(self.root, kind, prefix + os.urandom(16).hex())

    def create(self) -> None:
        """Make the root with its README, if it is not there, and check that it can be trusted.

        Raises:
            CacheUnusable: the folder belongs to another user, or others can write to it.
            OSError: it cannot be made.
        """
        if not os.path.isdir(self.root):
            os.makedirs(os.path.dirname(self.root), exist_ok=True)
            self.make_folder(self.root)
        self.check_trust()
        for name, text in (("README", _README), ("CACHEDIR.TAG", _CACHEDIR_TAG)):
            if not os.path.exists(os.path.join(self.root, name)):
                self.write_whole(os.path.join(self.root, name), text.encode())

    def make_folder(self, path: str) -> None:
        """Make one folder below the root with this layout's mode, whatever the umask; existing is fine."""
        try:
            os.mkdir(path, self.dir_mode)
        except FileExistsError:
            # Somebody may have been killed between the two calls, under a umask that leaves less.
            status = os.lstat(path)
            if stat.S_IMODE(status.st_mode) & self.dir_mode == self.dir_mode or status.st_uid != os.geteuid():
                return
        os.chmod(path, self.dir_mode)
        flush_folder(os.path.dirname(path))

    def make_parents(self, path: str) -> None:
        """Make the folders between the root and `path`, each with this layout's mode."""
        missing = []
        folder = os.path.dirname(path)
        while folder != self.root and not os.path.isdir(folder):
            missing.append(folder)
            folder = os.path.dirname(folder)
        if not os.path.isdir(self.root):
            self.create()  # somebody removed the whole cache meanwhile
        for folder in reversed(missing):
            self.make_folder(folder)

    def write_new(self, path: str, data: bytes) -> None:
        """Write a file that is not there yet, flushed to disk, with this layout's mode."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, self.file_mode)
        try:
            os.fchmod(descriptor, self.file_mode)
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def write_whole(self, path: str, data: bytes) -> None:
        """Replace a small file by one rename; what a killed writer leaves lies below staging, where it is swept."""
        temporary = self.unique(STAGING)
        self.make_folder(os.path.dirname(temporary))
        try:
            self.write_new(temporary, data)
            os.rename(temporary, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise

    def is_cache(self) -> bool:
        """Whether the root was made by this package, or is empty: a folder that may be tidied up."""
        if os.path.isdir(self.entries):
            return True
        try:
            with open(os.path.join(self.root, "CACHEDIR.TAG"), encoding="utf-8", errors="replace") as file:
                return file.read(len(_CACHEDIR_TAG) + 1) == _CACHEDIR_TAG
        except OSError:
            return not os.listdir(self.root)

    def check_trust(self) -> None:
        """Code is loaded from here: only this user or root may own the folder, and nobody else may write to it.

        Raises:
            CacheUnusable: naming the owner or mode and what to do.
        """
        status = os.stat(self.root)
        if not stat.S_ISDIR(status.st_mode):
            raise CacheUnusable(f"{self.root} is not a folder; name another with MUSE_JIT_CACHE_DIR")
        if status.st_uid not in (os.geteuid(), 0):
            raise CacheUnusable(
                f"{self.root} belongs to user id {status.st_uid}, not to this user ({os.geteuid()}) or root, and code "
                "is loaded from it; name another folder with MUSE_JIT_CACHE_DIR"
            )
        if status.st_mode & 0o022:
            raise CacheUnusable(
                f"{self.root} can be written by others (mode {stat.S_IMODE(status.st_mode):04o}), and code is loaded "
                f"from it; run: chmod go-w {self.root}"
            )
