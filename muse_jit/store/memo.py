"""memo.json in the cache folder: what `key.memo.Memo` knows, written when a kernel is published."""

import json
import os
import stat
from typing import Any

from muse_jit.key.encoding import content_digest
from muse_jit.store.layout import Layout

SCHEMA = 1
_MAX_BYTES = 4 << 20
"""Thousands of results; a memo that grew beyond begins anew."""


def load_memo(layout: Layout) -> dict[str, Any]:
    """The results that are known; none where there is no memo, it is damaged, or the folder cannot be trusted."""
    try:
        layout.check_trust()
        descriptor = os.open(layout.memo, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_BYTES:
                return {}
            head, _, body = file.read().partition(b"\n")
        if json.loads(head) != {"schema": SCHEMA, "sha256": content_digest(body)}:
            return {}
        results = json.loads(body)
        return results if isinstance(results, dict) else {}
    except Exception:  # whatever it is, the results can be computed
        return {}


def save_memo(layout: Layout, new: dict[str, Any]) -> dict[str, Any]:
    """Add what is new to what is there; returns all of it. What another writer adds at this moment is computed again.

    Raises:
        OSError: it cannot be written.
    """
    results = {**load_memo(layout), **new}
    body = json.dumps(results, sort_keys=True).encode()
    if len(body) > _MAX_BYTES // 2:
        results, body = new, json.dumps(new, sort_keys=True).encode()
    head = json.dumps({"schema": SCHEMA, "sha256": content_digest(body)}).encode()
    layout.write_whole(layout.memo, head + b"\n" + body)
    return results
