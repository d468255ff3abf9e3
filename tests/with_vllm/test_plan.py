"""The plan from a VllmConfig and that of `muse-jit plan --model ... --tp ...`: the same list, key by key."""

import json

import pytest
from support.process import command
from support.real_model import vllm_config

from muse_jit.errors import UsageError
from muse_jit.service import JitService
from muse_jit.vllm_plugin.deployment import plan_of


@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16])
def test_key_by_key(tmp_path, settings, tp):
    arches = ["sm_90a", "sm_100a", "sm_103a"]
    config = vllm_config(tmp_path, tp)
    ours = plan_of(config, arches, order="triton-3.8")
    arguments = ("--model", tmp_path / "config.json", "--tp", tp, "--arch", ",".join(arches))
    code, out, err = command("muse-jit", "plan", *arguments)
    assert code == 0, err
    theirs = json.loads(out)
    assert ours.as_dict()["kernels"] == theirs["kernels"]
    assert ours.as_dict()["unavailable"] == theirs["unavailable"]
    services = {arch: JitService(arch, settings) for arch in arches}
    file = tmp_path / "plan.json"
    file.write_text(out)
    from muse_jit.plan import read_plan

    for mine, other in zip(ours.kernels, read_plan(str(file)).kernels, strict=True):
        keys = [services[p.arch].key_of(p.constants)[1].digest for p in (mine, other)]
        assert keys[0] == keys[1]


def test_a_size_without_a_plan(tmp_path):
    with pytest.raises(UsageError, match="tensor parallel size 3; allowed: 1, 2, 4, 8, 16"):
        plan_of(vllm_config(tmp_path, 3), ["sm_90a"])
