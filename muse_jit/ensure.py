"""`JitService.ensure`: a list of kernels in the cache and in this process, with what it took.

Ranks of one host share the compiling through locks alone. With a process group, hosts that have the cache folder in
common divide it beforehand: locks on a network file system may not reach another host, and whoever loses a race there
would compile a key twice.
"""

import contextlib
import logging
import os
import socket
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from muse_jit.constants.base import ConstantSet
from muse_jit.errors import CacheUnusable, MissForbidden, MuseJitError, ToolchainError
from muse_jit.loader.capture import is_capturing
from muse_jit.report import KernelReport, Report
from muse_jit.wanted import Wanted, look_up_all

if TYPE_CHECKING:
    from muse_jit.service import JitService

logger = logging.getLogger("muse_jit")


class Peers(Protocol):
    """The ranks that ask for the same kernels; `ops.ranks.TorchPeers` is one over torch.distributed."""

    def gather(self, value: Any) -> list[Any]:
        """Everybody's value, by rank. Collective. Values are text and lists of text."""
        ...


def ensure(service: "JitService", wanted: Sequence[ConstantSet], peers: Peers | None) -> Report:
    """As `JitService.ensure` says."""
    started = time.monotonic()
    new = [c for c in wanted if not service.in_memory(c)]
    if new and is_capturing():
        service.get(new[0])  # which raises, with the remedy
    items = {c: Wanted(service, c) for c in new}
    missing = look_up_all(list(items.values()))
    if peers is not None:
        # The share of this host first; after the others have done theirs, whatever is missing all the same.
        share = _share(service, missing, peers)
        try:
            _fill(share)
        finally:
            peers.gather("filled")  # also by a rank that raises: the others wait here
        missing = look_up_all([item for item in missing if not item.settled])
    _fill(missing)
    from muse_jit.loader.kernel import several

    with several():
        kernels = [_load(service, items[c]) if c in items else _known(service, c) for c in wanted]
    report = Report(tuple(kernels), time.monotonic() - started, service.layout.root)
    logger.info("muse_jit for %s: %s", service.target.arch, report.summary())
    refused = [item.error for item in items.values() if isinstance(item.error, MissForbidden | ToolchainError)]
    if refused:
        more = f" (and {len(refused) - 1} more kernels)" if len(refused) > 1 else ""
        raise type(refused[0])(f"{refused[0]}{more}")
    return report


def _fill(missing: list[Wanted]) -> None:
    if missing:
        from muse_jit.fill import fill

        fill(missing)


def _known(service: "JitService", constants: ConstantSet) -> KernelReport:
    kernel = service.get(constants)
    return KernelReport(kernel.entry.digest, constants.family, service.target.arch, "hit")


def _load(service: "JitService", item: Wanted) -> KernelReport:
    if item.stored is not None:
        try:
            item.stored = service.keep(item.constants, item.stored, item.spans)
        except MuseJitError as error:
            item.error = error
    return item.report()


def _share(service: "JitService", items: list[Wanted], peers: Peers) -> list[Wanted]:
    """This host's part of the items: those hosts that see each other's files in the cache folder count off.

    Each rank writes a token and looks for the others'. A rank that cannot write shares with nobody.
    """
    host = socket.gethostname()
    token = ""
    with contextlib.suppress(OSError, CacheUnusable):
        token = service.flight.leave_token()
    try:
        told = peers.gather([host, token])
        shared = sorted({h for h, t in told if t and os.path.exists(t)} | {host})
        peers.gather("seen")
    finally:
        if token:
            with contextlib.suppress(OSError):
                os.unlink(token)
    number = shared.index(host)
    return [item for index, item in enumerate(items) if index % len(shared) == number]
