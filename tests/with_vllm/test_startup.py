"""A real worker's start-up, twice in processes of their own: the second one finds everything, compiling forbidden."""

import pytest
import vllm_startup


def _steps(record):
    return {step["step"]: step for step in record["steps"]}


@pytest.mark.parametrize("mode", ["auto", "forbid"])
def test_a_start_with_nothing_in_the_cache(tmp_path, mode):
    record = vllm_startup.run(mode, str(tmp_path / "cache"), 2)
    steps, (line,) = _steps(record), record["log"]
    assert steps["WorkerWrapperBase.init_worker"]["wrapped"]
    assert "stops_at" not in steps["Worker.load_model"]
    assert "stops_at" not in steps["Worker.compile_or_warm_up_model"]
    if mode == "forbid":
        assert line.startswith("WARNING muse_jit: preparing kernels failed and stock runs instead: MissForbidden: ")
        assert "muse-jit warmup " in line
        return
    assert line.startswith("INFO muse_jit: 3 kernels: 0 hits, 3 compiled")
    again = vllm_startup.run("forbid", str(tmp_path / "cache"), 2)
    assert _steps(again)["Worker.load_model"]["kernels"] == 3
    assert _steps(again)["Worker.compile_or_warm_up_model"]["told_serving"] == 1
    assert again["log"][0].startswith("INFO muse_jit: 3 kernels: 3 hits, 0 compiled")
