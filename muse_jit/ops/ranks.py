"""The ranks of a torch.distributed process group, for `JitService.ensure`."""

from typing import Any

import torch.distributed as dist


class TorchPeers:
    """Gathers small values over a process group; a gloo group will do, and keeps the GPU out of it.

    Args:
        group: the process group; default: the world.
    """

    def __init__(self, group: Any = None) -> None:
        self.group = group

    def gather(self, value: Any) -> list[Any]:
        """Everybody's value, by rank. Collective."""
        values: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(values, value, group=self.group)
        return values
