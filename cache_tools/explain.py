"""Hit or miss, and why: a wanted key against what the cache holds."""

import dataclasses
import os
from typing import Any

from cache_tools.opening import read_whole
from cache_tools.standing import Standings
from cache_tools.today import Today
from muse_jit.constants.base import ConstantSet
from muse_jit.errors import ConstantsError, ToolchainError, UsageError
from muse_jit.key.difference import Difference, difference
from muse_jit.key.encoding import KeyDigest
from muse_jit.key.kernel_key import KernelKey
from muse_jit.settings import Settings
from muse_jit.store.entry import BadManifest, Entry
from muse_jit.store.layout import MANIFEST, SET_ASIDE, Layout
from muse_jit.store.listing import digests
from muse_jit.store.lookup import Hit, Miss, find
from muse_jit.store.nearest import nearest, nearest_each


@dataclasses.dataclass
class Explanation:
    """The answer about one kernel."""

    kernel: str | None
    arch: str | None
    digest: str
    status: str
    """ "hit", "miss", or "dead": an intact entry that a look-up here asks for no more."""
    reason: str | None = None
    detail: str = ""
    constants: dict[str, Any] | None = None
    created: float | None = None
    """When the entry was made, of one that is there and sound."""
    nearest: Entry | None = None
    differences: list[Difference] = dataclasses.field(default_factory=list)
    """From the nearest entry to what is asked for; of a hit, from the nearest one made before it, which says why it was
    compiled; of a dead entry, from it to what is asked for now."""

    @property
    def damaged(self) -> bool:
        """Whether something stands in the entry's place that cannot be used."""
        return self.status == "miss" and self.reason not in ("absent", "set_aside")

    def as_dict(self) -> dict[str, Any]:
        """The fields in JSON."""
        return {
            "kernel": self.kernel,
            "arch": self.arch,
            "digest": self.digest,
            "status": self.status,
            "reason": self.reason,
            "detail": self.detail,
            "constants": self.constants,
            "created": self.created,
            "nearest": None if self.nearest is None else self.nearest.digest,
            "differences": [dataclasses.asdict(d) for d in self.differences],
        }


def explain_keys(layout: Layout, keys: list[KernelKey]) -> list[Explanation]:
    """What a look-up of each key gives; for misses, and a single hit, also what comes nearest."""
    result = []
    for key in keys:
        found = find(layout, key)
        explanation = Explanation(key.kernel, key.target.arch, key.digest, "hit", constants=key.constants)
        if isinstance(found, Hit):
            explanation.created = found.entry.created
        else:
            explanation.status, explanation.reason, explanation.detail = "miss", str(found.reason), found.detail
        result.append(explanation)
    missed = [n for n, e in enumerate(result) if e.status == "miss"]
    for number, near in zip(missed, nearest_each(layout, [keys[n].document for n in missed]), strict=True):
        if near is not None:
            result[number].nearest, result[number].differences = near
    if len(result) == 1:
        _why_compiled(layout, result[0], keys[0].document)
    return result


def _why_compiled(layout: Layout, explanation: Explanation, key: dict[str, Any]) -> None:
    """Of a hit: what was nearest when it was compiled."""
    near = None if explanation.created is None else nearest(layout, key, before=explanation.created)
    if explanation.status == "hit" and near is not None:
        explanation.nearest, explanation.differences = near


def explain_constants(
    layout: Layout, settings: Settings, standings: Standings, wanted: list[tuple[ConstantSet, str]]
) -> list[Explanation]:
    """What a look-up of each constant set gives with the toolchain and source of now.

    Raises:
        ToolchainError, UsageError, ConstantsError: as `Today.key`.
    """
    today = Today(settings, standings)
    return explain_keys(layout, [today.key(constants, arch) for constants, arch in wanted])


def explain_digest(layout: Layout, settings: Settings, standings: Standings, prefix: str) -> Explanation:
    """What is known of a digest: a sound entry that is asked for, one that is not any more, a damaged one, or none.

    Raises:
        UsageError: several entries begin with the prefix.
    """
    found = list(digests(layout, prefix))
    if len(found) > 1:
        some = ", ".join(d[: len(prefix) + 6] for d in found[:4])
        raise UsageError(f"{len(found)} entries begin with {prefix!r}: {some}{', ...' if len(found) > 4 else ''}")
    if not found:
        return _gone(layout, prefix)
    stored = read_whole(layout, found[0])
    if isinstance(stored, Miss):
        return Explanation(None, None, found[0], "miss", str(stored.reason), stored.detail)
    entry = stored.entry
    result = Explanation(entry.kernel, entry.arch, entry.digest, "hit", constants=entry.key["constants"])
    result.created = entry.created
    try:
        now: KernelKey | None = Today(settings, standings).key_of_entry(entry)[2]
    except (UsageError, ConstantsError, ToolchainError) as error:
        result.detail = f"whether it is still asked for cannot be told: {error}"
        now = None
    if now is None or now.digest == entry.digest:
        _why_compiled(layout, result, entry.key)
    else:
        result.status, result.reason, result.nearest = "dead", "not_asked_for", entry
        result.differences = difference(entry.key, now.document)
        there = "is in the cache, too" if isinstance(find(layout, now), Hit) else "is not in the cache"
        result.detail = f"its constants are now looked up as {now.digest[:12]}, which {there}"
    return result


def _gone(layout: Layout, prefix: str) -> Explanation:
    """No entry: perhaps one that was set aside, whose manifest still says what it was."""
    for name in _set_aside(layout, prefix):
        digest = KeyDigest(name.partition("-")[0])
        result = Explanation(
            None, None, digest, "miss", "set_aside", f"kept in {os.path.join(layout.root, SET_ASIDE, name)}"
        )
        entry = _manifest_of(os.path.join(layout.root, SET_ASIDE, name))
        if entry is not None and entry.digest == digest:
            result.kernel, result.arch, result.constants = entry.kernel, entry.arch, entry.key["constants"]
            near = nearest(layout, entry.key)
            if near is not None:
                result.nearest, result.differences = near
        return result
    detail = "a digest alone does not say of what; ask with --plan or with the constants"
    return Explanation(None, None, prefix, "miss", "absent", detail)


def _set_aside(layout: Layout, prefix: str) -> list[str]:
    try:
        return [n for n in sorted(os.listdir(os.path.join(layout.root, SET_ASIDE))) if n.startswith(prefix)]
    except OSError:
        return []


def _manifest_of(folder: str) -> Entry | None:
    try:
        descriptor = os.open(os.path.join(folder, MANIFEST), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            return Entry.from_json(file.read(1 << 20))
    except (OSError, BadManifest):
        return None
