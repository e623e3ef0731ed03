"""Which agent a host has."""

import pytest

from cloudtrain_runtime.launcher.host_agent import HostOptions

ARGUMENTS = [
    "--nnodes=1",
    "--nproc-per-node=2",
    "--max-restarts=3",
    "--rdzv-backend=c10d",
    "--rdzv-endpoint=",
    "--rdzv-id=run",
    "--rdzv-conf=store_type=hash,join_timeout=1",
    "--local-addr=127.0.0.1",
    "worker.py",
]


def test_a_single_host_has_an_agent_without_torch() -> None:
    expected = HostOptions(
        ranks=2, max_restarts=3, address="127.0.0.1", run="run", script="worker.py"
    )
    assert HostOptions.of(ARGUMENTS, {"TORCHELASTIC_RUN_ID": "outer"}) == expected


@pytest.mark.parametrize("other", ["--nnodes=2", "--nproc-per-node=auto"])
def test_what_only_torch_can_decide_is_torchruns(other: str) -> None:
    name = other.partition("=")[0]
    arguments = [other if each.startswith(name) else each for each in ARGUMENTS]
    assert HostOptions.of(arguments, {}) is None


@pytest.mark.parametrize(
    "name", ["PET_LOG_DIR", "PET_NUMA_BINDING", "TORCHELASTIC_HEALTH_CHECK_PORT"]
)
def test_settings_of_torchrun_reach_its_own_agent(name: str) -> None:
    assert HostOptions.of(ARGUMENTS, {name: "1"}) is None
