"""The context of a process, from the variables of torchrun, mpirun and SageMaker, and the SM_* variables."""

import functools
import itertools
import json
from pathlib import Path

import pytest
import torch

from cloudtrain.backends.container.machine import count_cards, share_gpus, visible_gpus
from cloudtrain_runtime.contract import CARDS_VARIABLE, HOSTS_HERE_VARIABLE, MlTree
from cloudtrain_runtime.launcher.host import count_gpus
from cloudtrain_runtime.launcher.sagemaker_environment import sagemaker_variables
from cloudtrain_runtime.process.environment import torchrun_variables
from cloudtrain_runtime.process.run_context import Channels, choose_device, read_context


def test_outside_of_a_run_there_is_one_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    context = read_context({})
    assert (context.rank, context.world_size, context.run, context.host) == (0, 1, "", "localhost")
    assert context.model_dir == tmp_path / "model"
    assert context.is_main


def test_torchruns_variables_are_read() -> None:
    environ = {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "SM_HOSTS": '["b", "a"]',
    }
    context = read_context({**environ, "SM_CURRENT_HOST": "b", "TORCHELASTIC_RESTART_COUNT": "2"})
    assert (context.rank, context.world_size, context.local_rank, context.local_world_size) == (
        5,
        8,
        1,
        4,
    )
    assert context.hosts == ("a", "b")
    assert context.restarts == 2
    assert not context.is_main


def test_mpirun_variables_give_ranks_and_the_first_host() -> None:
    environ = {
        "OMPI_COMM_WORLD_RANK": "9",
        "OMPI_COMM_WORLD_SIZE": "16",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "8",
        "SM_HOSTS": '["algo-2", "algo-10", "algo-1"]',
    }
    assert torchrun_variables(environ) == {
        "RANK": "9",
        "WORLD_SIZE": "16",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "8",
        "MASTER_ADDR": "algo-1",
        "MASTER_PORT": "7777",
    }
    assert torchrun_variables({**environ, "MASTER_PORT": "1234"}).get("MASTER_PORT") is None
    assert read_context(environ).rank == 9


@pytest.mark.parametrize(
    ("gpus", "local_rank", "local_world_size", "distribution", "device", "backend"),
    [
        (0, 1, 2, "torch_distributed", "cpu", "gloo"),
        (8, 3, 8, "torch_distributed", "cuda:3", "nccl"),
        (8, 3, 8, "smdistributed", "cuda:3", "smddp"),
        (8, 3, 8, "pytorchddp", "cuda:3", "smddp"),
        (1, 1, 2, "torch_distributed", "cuda:0", "gloo"),
        (2, 3, 4, "smdistributed", "cuda:1", "gloo"),
    ],
)
def test_nccl_needs_a_gpu_for_each_rank(
    monkeypatch: pytest.MonkeyPatch,
    gpus: int,
    local_rank: int,
    local_world_size: int,
    distribution: str,
    device: str,
    backend: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert choose_device(local_rank, local_world_size, distribution, {}) == (
        torch.device(device),
        backend,
    )


def test_hosts_of_one_machine_share_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo exactly where the ranks of any two hosts, or of one, are on the same card."""
    for cards, hosts, ranks in itertools.product(range(7), range(1, 6), range(1, 6)):
        names = tuple(f"GPU-{card}" for card in range(cards))
        used, backends = [], set()
        for host in share_gpus(names, hosts):
            monkeypatch.setattr(torch.cuda, "device_count", functools.partial(len, host))
            environ = {CARDS_VARIABLE: str(count_cards(names)), HOSTS_HERE_VARIABLE: str(hosts)}
            for rank in range(ranks):
                device, backend = choose_device(rank, ranks, "", environ)
                used.append(host[device.index] if host else "")
                backends.add(backend)
        is_shared = not cards or len(set(used)) < len(used)
        assert backends == {"gloo" if is_shared else "nccl"}, (cards, hosts, ranks)


@pytest.mark.parametrize(
    ("visible", "names", "cards"),
    [
        ("0,3", ("0", "3"), 2),
        ("GPU-8932f937,GPU-4f1a", ("GPU-8932f937", "GPU-4f1a"), 2),
        ("MIG-a, MIG-b", ("MIG-a", "MIG-b"), 1),
        ("1,-1,0", ("1",), 1),
        ("", (), 0),
        ("-1", (), 0),
    ],
)
def test_gpus_are_those_that_cuda_shows(
    visible: str, names: tuple[str, ...], cards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = {"CUDA_VISIBLE_DEVICES": visible}
    assert visible_gpus(environ) == names
    assert count_cards(names) == cards
    monkeypatch.delenv("CLOUDTRAIN_GPUS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert count_gpus() == len(names)


def test_sm_variables_describe_hosts_channels_and_arguments(tmp_path: Path) -> None:
    tree = MlTree(tmp_path)
    tree.config.mkdir(parents=True)
    (tree.config / "resourceconfig.json").write_text(
        json.dumps(
            {
                "hosts": ["algo-1", "algo-2"],
                "current_host": "algo-2",
                "network_interface_name": "eth0",
            }
        )
    )
    (tree.config / "inputdataconfig.json").write_text(json.dumps({"train": {}, "my-data": {}}))
    (tree.config / "hyperparameters.json").write_text(
        json.dumps({"lr": "0.1", "name": "plain", "sagemaker_x": '"y"'})
    )
    found = sagemaker_variables(tree, gpus=4, user_args=["--lr", "0.1"], entry_point="train.py")
    assert found["SM_CHANNEL_TRAIN"] == f"{tmp_path}/input/data/train"
    assert found["SM_CHANNEL_MY-DATA"] == f"{tmp_path}/input/data/my-data"
    assert json.loads(found["SM_CHANNELS"]) == ["my-data", "train"]
    assert json.loads(found["SM_HPS"]) == {"lr": 0.1, "name": "plain"}
    assert (found["SM_HP_LR"], found["SM_HP_NAME"]) == ("0.1", "plain")
    assert (found["SM_CURRENT_HOST"], found["SM_NUM_GPUS"]) == ("algo-2", "4")
    assert found["SM_MODULE_NAME"] == "train"
    assert json.loads(found["SM_FRAMEWORK_PARAMS"]) == {"sagemaker_x": "y"}


def test_sm_variables_describe_groups_and_the_environment(tmp_path: Path) -> None:
    tree = MlTree(tmp_path)
    tree.config.mkdir(parents=True)
    tree.run_config.parent.mkdir(parents=True)
    tree.run_config.touch()
    hosts = ["algo-1", "algo-2"]
    group = {
        "instance_group_name": "homogeneousCluster",
        "instance_type": "ml.g5.xlarge",
        "hosts": hosts,
    }
    resources = {
        "hosts": hosts,
        "current_host": "algo-1",
        "current_group_name": "homogeneousCluster",
    }
    (tree.config / "resourceconfig.json").write_text(
        json.dumps({**resources, "instance_groups": [group]})
    )
    (tree.config / "inputdataconfig.json").write_text(
        json.dumps({"train": {}, "code": {}, "cloudtrain": {}})
    )
    found = sagemaker_variables(tree, gpus=1, user_args=["--lr", "0.1"], entry_point="train.py")
    assert json.loads(found["SM_CHANNELS"]) == ["train"]
    assert {name for name in found if name.startswith("SM_CHANNEL_")} == {"SM_CHANNEL_TRAIN"}
    assert found["SM_CURRENT_INSTANCE_GROUP"] == "homogeneousCluster"
    assert json.loads(found["SM_CURRENT_INSTANCE_GROUP_HOSTS"]) == hosts
    assert json.loads(found["SM_INSTANCE_GROUPS"]) == ["homogeneousCluster"]
    assert json.loads(found["SM_INSTANCE_GROUPS_DICT"]) == {"homogeneousCluster": group}
    assert json.loads(found["SM_DISTRIBUTION_INSTANCE_GROUPS"]) == ["homogeneousCluster"]
    assert (found["SM_IS_HETERO"], found["SM_NUM_NEURONS"], found["SM_FRAMEWORK_MODULE"]) == (
        "false",
        "0",
        "",
    )
    assert found["SM_OUTPUT_INTERMEDIATE_DIR"] == f"{tmp_path}/output/intermediate"
    environment = json.loads(found["SM_TRAINING_ENV"])
    assert environment["channel_input_dirs"] == {"train": f"{tmp_path}/input/data/train"}
    described = (environment["hyperparameters"], environment["num_gpus"], environment["is_master"])
    assert described == ({"lr": 0.1}, 1, True)


def test_a_channel_that_the_job_lacks_says_how_to_add_it() -> None:
    channels = Channels(train=Path("/opt/ml/input/data/train"))
    assert channels["train"].name == "train"
    with pytest.raises(KeyError, match=r"no channel 'test' \(its channels: train\)"):
        channels["test"]
    with pytest.raises(
        KeyError, match=r"it has no channels\). Add to the job file: data: \{x: FOLDER\}"
    ):
        Channels()["x"]
    assert channels.get("test") is None
