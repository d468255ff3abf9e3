"""What the host and the kernels agree on about a mailbox; how it works is said in `kernels/mailbox.py`."""

import dataclasses

TPS = (2, 4, 8, 16)
"""Ranks that can share a mailbox."""
TRANSPORTS = ("peer", "multicast")
CAPACITY = 64
"""Rows of a mailbox unless said otherwise: the largest decode step that is planned for."""
MAX_CAPACITY = 4096
GENERATIONS = 3
SENTINEL = 0x80008000 - (1 << 32)
"""A 32-bit word that nobody has stored to: two BF16 -0, as a signed number."""
FAILED = -1
"""Generation of every row of a rank that gave up waiting."""
REPORTED = 1 << 30
"""Set in a status that reports something: generation << 24 | missing rank << 16 | row."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """What decides the addresses in a mailbox: BF16 [generations][tp][capacity][width] on every rank."""

    tp: int
    capacity: int
    width: int
    transport: str = "peer"

    @property
    def rank_bytes(self) -> int:
        """From a rank's slot to the next one's."""
        return self.capacity * self.width * 2


@dataclasses.dataclass(frozen=True)
class Missing:
    """What a rank waited for in vain."""

    rank: int
    row: int
    generation: int


def missing_of(status: int) -> Missing | None:
    """What a status word reports."""
    return Missing(status >> 16 & 0xFF, status & 0xFFFF, status >> 24 & 3) if status else None
