"""One process group for the module functions that ask for it: gloo, one rank."""

import pytest


@pytest.fixture(scope="session")
def parallel_state(tmp_path_factory):
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig(device="cpu"))):
        path = tmp_path_factory.mktemp("group") / "rendezvous"
        init_distributed_environment(1, 0, f"file://{path}", 0, "gloo")
        initialize_model_parallel(1, 1)
        yield
