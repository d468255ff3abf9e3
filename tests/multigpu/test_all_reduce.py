"""The fused all-reduce between real GPUs, as torchrun jobs: benchmarks/all_reduce.py and a job with a missing rank."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]
NO_MULTICAST = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0", "NVSHMEM_DISABLE_NVLS": "1"}

pytestmark = [pytest.mark.multigpu, pytest.mark.timeout(600)]


def _ranks():
    """The most ranks that a fused boundary has here."""
    return max(n for n in (2, 4, 8) if n <= torch.cuda.device_count())


def _torchrun(script, *arguments):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(_ranks())]
    environment = {**os.environ, **NO_MULTICAST, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, str(ROOT / script), *arguments], capture_output=True, text=True, timeout=580, env=environment
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    return done.stdout


@pytest.mark.parametrize(
    "options",
    [[], ["--sum-order", "node-local"], ["--published", "copy"], ["--published", "copy", "--wait-last"]],
    ids=" ".join,
)
def test_bits_on_every_rank_over_replays(tmp_path, options):
    result = tmp_path / "bits.json"
    _torchrun("benchmarks/all_reduce.py", "--check", "400", "--json", str(result), *options)
    document = json.loads(result.read_text())
    assert document["ranks"] == _ranks()
    assert document["bits"]["boundaries"] == 400 * 62
    assert document["bits"]["differ"] == 0


def test_times_are_written_for_all_sides(tmp_path):
    result = tmp_path / "times.json"
    _torchrun("benchmarks/all_reduce.py", "--time", "--replays", "5", "--rows", "1,64", "--json", str(result))
    rows = json.loads(result.read_text())["rows"]
    assert set(rows) == {"1", "64"}
    for row in rows.values():
        assert all(0 < value < 1000 for value in row["microseconds"].values())
        assert set(row["ours_to"]) == {"nccl + stock dual norm", "one_shot_all_reduce + stock dual norm"}


def test_a_rank_that_stays_away_is_named_and_a_reset_repairs_it():
    out = _torchrun("tests/multigpu/one_rank_missing.py")
    lines = [line.split("|") for line in out.splitlines() if line.count("|") == 4]
    last = _ranks() - 1
    assert sorted(int(line[0]) for line in lines) == list(range(_ranks()))
    for number, before, after, seconds, said in lines:
        assert (before, after) == ("True", "True")
        if int(number) != last:
            assert 0.9 < float(seconds) < 5
            assert f"of rank {last} " in said


def test_it_refuses_to_run_where_multicast_is_not_switched_off():
    environment = {name: value for name, value in os.environ.items() if name not in NO_MULTICAST}
    command = [sys.executable, str(ROOT / "benchmarks" / "all_reduce.py"), "--check", "1"]
    done = subprocess.run(command, capture_output=True, text=True, env={**environment, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 1
    assert "set TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NCCL_NVLS_ENABLE=0 NVSHMEM_DISABLE_NVLS=1" in done.stderr
