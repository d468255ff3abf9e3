"""Which parts of two key documents differ: the answer to "why did this recompile"."""

import dataclasses
from typing import Any

from muse_jit.key.encoding import encode

_ABSENT = "(absent)"


@dataclasses.dataclass(frozen=True)
class Difference:
    """One leaf that differs. `part` is its path in the document, "constants.eps" for instance."""

    part: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.part}: {self.old!r} -> {self.new!r}"


def difference(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[Difference]:
    """The leaves in which two key documents differ, in the order of their paths; types count, as in the digest."""
    result: list[Difference] = []
    for name in sorted(old.keys() | new.keys()):
        before, after = old.get(name, _ABSENT), new.get(name, _ABSENT)
        if isinstance(before, dict) and isinstance(after, dict):
            result += difference(before, after, f"{prefix}{name}.")
        elif encode(before) != encode(after):
            result.append(Difference(prefix + name, before, after))
    return result
