"""What a service counts, and how it tells of trouble."""

import dataclasses
import logging
import threading

from muse_jit.errors import CacheUnusable

logger = logging.getLogger("muse_jit")


@dataclasses.dataclass
class Counters:
    """What a service did: one count for each way a request was answered, and what went wrong beside it."""

    memory_hits: int = 0
    disk_hits: int = 0
    compiled: int = 0
    failed: int = 0
    verified: int = 0
    """Kernels of the cache that were compiled again and compared (mode verify)."""
    waited: int = 0
    """Requests that waited for another process to compile the same key."""
    not_stored: int = 0
    """Kernels that were compiled and could not be written to the cache."""
    misses: dict[str, int] = dataclasses.field(default_factory=dict)
    """Reason of a miss to how often."""


class Trouble:
    """Warns once per message about trouble of the cache, or raises where MUSE_JIT_STRICT says so."""

    def __init__(self, strict: bool) -> None:
        self.strict = strict
        self._said: set[str] = set()
        self._state = threading.Lock()

    def forget_threads(self) -> None:
        """After a fork, in the child."""
        self._state = threading.Lock()

    def warn(self, message: str) -> None:
        """Raises `CacheUnusable` when strict."""
        if self.strict:
            raise CacheUnusable(f"{message} (MUSE_JIT_STRICT)")
        self.say(message)

    def say(self, message: str) -> None:
        """Warn once per message, of what is no trouble of the cache."""
        with self._state:
            known = message in self._said
            self._said.add(message)
        if not known:
            logger.warning("%s", message)
