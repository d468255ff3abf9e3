"""Ranks that are processes and share one GPU, over torch's symmetric memory: the real mailbox without a second GPU."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu

JOB = pathlib.Path(__file__).with_name("processes_of_one_gpu.py")
NO_MULTICAST = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0", "NVSHMEM_DISABLE_NVLS": "1"}


@pytest.mark.parametrize(("tp", "boundaries", "replays"), [(2, 120, 30), (4, 60, 12), (8, 40, 6)])
def test_processes_that_share_a_gpu_get_the_stock_bits(tp, boundaries, replays):
    environment = {
        **os.environ,
        **NO_MULTICAST,
        "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(tp)]
    command += [str(JOB), str(boundaries), str(replays)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    said = json.loads(next(line for line in run.stdout.splitlines() if line.startswith("{")))
    assert said == {"tp": tp, "boundaries": boundaries, "replays": replays, "layers": 6, "differ": 0}
