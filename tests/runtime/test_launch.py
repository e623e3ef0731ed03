"""The launcher of a host: torchrun's arguments, environment variables, and runs that cannot start."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.hosts import SCRIPT_RUN
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from cloudtrain.backends.container.filesystem import host_names
from cloudtrain.backends.container.machine import free_port, host_addresses
from cloudtrain_runtime import launch
from cloudtrain_runtime.contract import MlTree
from cloudtrain_runtime.launcher import toolkit
from cloudtrain_runtime.launcher.host import Host, count_gpus
from cloudtrain_runtime.launcher.sagemaker_environment import toolkit_variables

ENTRYPOINTS = Path(launch.__file__).parent.parent
CONFIG = replace(SCRIPT_RUN, run="demo-261120-101500-1a2b3c", max_restarts=3)
HOST = Host("algo-2", ("algo-1", "algo-10", "algo-2"), "eth0")


def test_torchrun_gets_the_address_and_ranks_of_its_host() -> None:
    arguments = launch.torchrun_arguments(CONFIG, HOST, {})
    assert "--nnodes=3" in arguments
    assert "--nproc-per-node=2" in arguments
    assert "--max-restarts=3" in arguments
    (endpoint,) = [each for each in arguments if each.startswith("--rdzv-endpoint=")]
    assert endpoint == f"--rdzv-endpoint=algo-1:{launch.rendezvous_port(CONFIG.key)}"
    assert CONFIG.key not in " ".join(arguments)
    assert "--local-addr=algo-2" in arguments
    assert any(argument.startswith("--rdzv-conf=is_host=false,") for argument in arguments)
    master = Host("algo-1", HOST.hosts, "eth0")
    assert any(
        "is_host=true" in argument for argument in launch.torchrun_arguments(CONFIG, master, {})
    )


def test_torchrun_gets_addresses_and_port_of_a_local_run() -> None:
    environ = {
        "CLOUDTRAIN_HOST_ADDRESSES": json.dumps({"algo-1": "127.0.0.1", "algo-2": "127.0.0.2"}),
        "CLOUDTRAIN_RENDEZVOUS_PORT": "23456",
    }
    arguments = launch.torchrun_arguments(CONFIG, HOST, environ)
    assert "--rdzv-endpoint=127.0.0.1:23456" in arguments
    assert "--local-addr=127.0.0.2" in arguments


def test_hosts_agree_on_a_port_that_the_key_chooses() -> None:
    ports = {launch.rendezvous_port(str(number)) for number in range(20)}
    assert len(ports) > 15
    assert all(20000 <= port < 32768 for port in ports)


def test_hosts_on_one_machine_need_no_port(tmp_path: Path) -> None:
    arguments = launch.torchrun_arguments(CONFIG, Host("algo-1", ("algo-1",), "eth0"), {})
    options = dict(each.partition("=")[::2] for each in arguments)
    assert options["--rdzv-endpoint"] == ""
    assert options["--rdzv-conf"].startswith("store_type=hash,")
    assert options["--local-addr"] == "127.0.0.1"
    given = {"CLOUDTRAIN_RENDEZVOUS_FILE": str(tmp_path / "meeting")}
    arguments = launch.torchrun_arguments(CONFIG, HOST, given)
    assert f"--rdzv-endpoint={tmp_path}/meeting" in arguments


def test_torchrun_orders_hosts_as_we_do() -> None:
    """Torchrun numbers its nodes by --local-addr as text: rank 0 must be on the first host."""
    hosts = host_names(11)
    addresses = host_addresses(hosts)
    assert list(hosts) == sorted(hosts)
    if len(set(addresses.values())) == 1:
        pytest.skip("this machine has one loopback address for all hosts")
    endpoint = f"{addresses[hosts[0]]}:{free_port()}"
    options = {"run_id": "demo", "min_nodes": len(hosts), "max_nodes": len(hosts)}

    handlers = [
        get_rendezvous_handler(
            RendezvousParameters(
                "c10d",
                endpoint,
                **options,
                local_addr=addresses[host],
                is_host=str(host == hosts[0]),
            )
        )
        for host in hosts
    ]
    with ThreadPoolExecutor(len(hosts)) as pool:
        joined = pool.map(lambda handler: handler.next_rendezvous().rank, handlers)
        assert list(joined) == list(range(len(hosts)))
    for handler in reversed(handlers):  # the first one holds the store
        handler.shutdown()


def test_environment_variables_of_the_user_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "mine")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("CLOUDTRAIN_GPUS", "0")
    found = launch.host_variables(MlTree(tmp_path), CONFIG, HOST)
    assert found["NCCL_SOCKET_IFNAME"] == "mine"
    assert found["GLOO_SOCKET_IFNAME"] == "eth0"
    assert int(found["OMP_NUM_THREADS"]) >= 1
    monkeypatch.setenv("CLOUDTRAIN_GPUS", "2")
    assert "OMP_NUM_THREADS" not in launch.host_variables(MlTree(tmp_path), CONFIG, HOST)


def test_no_variables_of_libfabric_are_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`FI_EFA_USE_DEVICE_RDMA=1` makes libfabric abort on g4dn, g5 and p3dn, whose devices have no RDMA read."""
    monkeypatch.setenv("CLOUDTRAIN_GPUS", "8")
    devices = {Path("/sys/class/infiniband"): [Path("efa_0")]}
    monkeypatch.setattr(
        Path, "is_dir", lambda path, real=Path.is_dir: path in devices or real(path)
    )
    monkeypatch.setattr(
        Path, "iterdir", lambda path, real=Path.iterdir: iter(devices.get(path) or real(path))
    )
    found = launch.host_variables(MlTree(tmp_path), CONFIG, HOST)
    assert [name for name in found if name.startswith(("FI_", "RDMAV_"))] == []
    assert [name for name in found if name.startswith("NCCL_")] == ["NCCL_SOCKET_IFNAME"]


@pytest.mark.parametrize(
    ("environ", "changes", "is_set"),
    [
        ({}, {}, True),
        ({"CLOUDTRAIN_GPUS": "1"}, {}, False),
        ({}, {"cuda_on_cpu": 2}, False),
        (
            {"ACCELERATE_MIXED_PRECISION": "no"},
            {},
            False,
        ),  # the job or its image configures Accelerate
        ({}, {"processes_per_instance": None}, True),
        ({}, {"starts_ranks": True}, True),
        ({}, {"starts_ranks": True, "command": ["torchrun", "train.py"]}, True),
    ],
)
def test_accelerate_is_distributed_without_gpus(
    environ: dict[str, str],
    changes: dict[str, Any],
    is_set: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CLOUDTRAIN_GPUS", "0")
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    found = launch.host_variables(MlTree(tmp_path), replace(CONFIG, **changes), HOST)
    assert (found.get("ACCELERATE_USE_CPU") == "true") == is_set


@pytest.mark.parametrize("command", [[], ["python", "train.py"]])
def test_accelerate_wraps_no_model_of_a_single_rank(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLOUDTRAIN_GPUS", "0")
    config = replace(CONFIG, processes_per_instance=1, command=command, starts_ranks=bool(command))
    alone = replace(HOST, name="algo-1", hosts=("algo-1",))
    found = launch.host_variables(MlTree(tmp_path), config, alone)
    assert "ACCELERATE_USE_CPU" not in found


def test_accelerate_is_distributed_under_the_toolkit(tmp_path: Path) -> None:
    config = replace(CONFIG, script="train.py")
    for size, gpus, expected in (("2", "0", "true"), ("1", "0", None), ("2", "8", None)):
        environ = {"OMPI_COMM_WORLD_SIZE": size, "SM_NUM_GPUS": gpus}
        found = toolkit_variables(MlTree(tmp_path), config, environ)
        assert found.get("ACCELERATE_USE_CPU") == expected


def test_gpus_are_counted_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CLOUDTRAIN_GPUS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,3")
    assert count_gpus() == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert count_gpus() == 0


@pytest.mark.parametrize(
    ("requested", "limit", "ranks"),
    [(8, 2, 2), (None, 2, 2), (1, 2, 1), (8, 0, 8), (None, 0, None)],
)
def test_a_lower_limit_of_ranks_per_host_is_reported(
    requested: int | None,
    limit: int,
    ranks: int | None,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("CLOUDTRAIN_MOST_PROCESSES", str(limit))
    assert launch.limit_processes(requested) == ranks
    assert ("ranks on this instance instead of" in capfd.readouterr().out) == (ranks != requested)


def test_toolkit_passes_hyperparameters_to_the_script() -> None:
    parameters = {
        "lr": 0.1,
        "epochs": 3,
        "flag": True,
        "name": "a b",
        "sagemaker_program": "train.py",
        "e": 1,
    }
    assert toolkit.script_arguments(parameters) == [
        *("-e", "1", "--epochs", "3", "--flag", "True", "--lr", "0.1", "--name", "a b")
    ]
    assert toolkit.start_command(parameters, HOST, {}) == [sys.executable]
    environ = {
        "CLOUDTRAIN_HOST_ADDRESSES": '{"algo-1": "127.0.0.1"}',
        "CLOUDTRAIN_MOST_PROCESSES": "2",
    }
    assert toolkit.start_command(
        {**parameters, "sagemaker_torch_distributed_enabled": True}, HOST, environ
    )[1:] == [
        *(
            "-m",
            "torch.distributed.run",
            "--nnodes=3",
            "--nproc_per_node=2",
            "--master_addr=127.0.0.1",
        ),
        *("--master_port=7777", "--node_rank=2"),
    ]


@pytest.mark.parametrize(
    ("content", "expected"),
    [(None, "No such file"), ("{}", "version None"), ("not json", "cannot be read")],
)
def test_an_unreadable_run_json_is_the_failure(
    tmp_path: Path, content: str | None, expected: str
) -> None:
    tree = MlTree(tmp_path)
    if content is not None:
        tree.run_config.parent.mkdir(parents=True)
        tree.run_config.write_text(content)
    done = subprocess.run(
        [sys.executable, "-m", "cloudtrain_runtime.launch"],
        env={**os.environ, "CLOUDTRAIN_ML_ROOT": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert expected in tree.failure.read_text()
    assert "Traceback" not in done.stderr


def test_an_agent_that_was_killed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It is torchrun's or that of a single host."""
    monkeypatch.setenv("CLOUDTRAIN_ML_ROOT", str(tmp_path))
    tree = MlTree(tmp_path)
    launch.container_exit_code(tree, CONFIG, HOST, -9, is_stopping=False)
    assert tree.failure.read_text() == "the agent of the ranks on algo-2 ended with SIGKILL"
    assert "the agent of the ranks" in capfd.readouterr().out
