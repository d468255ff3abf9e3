"""Peers over a real process group."""

import pytest
from field.barrier import homes, together, values
from support import toy

pytestmark = pytest.mark.processes

RANK = """
import torch.distributed as dist
from muse_jit.ops.ranks import TorchPeers
dist.init_process_group("gloo", init_method="file://{store}", rank={rank}, world_size=2)
reach()
s = service()
report = s.ensure([toy.ToyConstants(value=v, count_file={count!r}, seconds=0.1) for v in range(4)], peers=TorchPeers())
print(report.compiled + report.hits, TorchPeers().gather(["rank", str({rank})]))
dist.destroy_process_group()
"""


def test_ranks_of_a_group_share_the_work(settings, tmp_path):
    store, count = tmp_path / "store", str(tmp_path / "count")
    codes = [RANK.format(store=store, rank=rank, count=count) for rank in range(2)]
    outs = values(together(tmp_path, codes, block=("cutlass",), MUSE_JIT_WORKERS=2, **homes(settings)))
    assert outs == ["4 [['rank', '0'], ['rank', '1']]"] * 2
    assert toy.compiles(tmp_path / "count") == 4
