"""A script gets the same argv, environment and files in local runs, in the sandbox and by the entry command."""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.jobs import Cli
from support.sandboxes import Served, serve

from cloudtrain.backends.container import mount_namespace
from cloudtrain.backends.container.machine import free_port, host_addresses, loopback_interface
from cloudtrain.support.s3_uri import split_uri
from cloudtrain_runtime.contract import (
    ADDRESSES_VARIABLE,
    CARDS_VARIABLE,
    GPUS_VARIABLE,
    GRACE_VARIABLE,
    HOSTS_HERE_VARIABLE,
    INSTANCE_VARIABLE,
    MAX_PROCESSES_VARIABLE,
    ML_ROOT_VARIABLE,
    PORT_VARIABLE,
    RENDEZVOUS_FILE_VARIABLE,
    MlTree,
    parse_event,
)

pytestmark = [pytest.mark.processes, pytest.mark.aws]

HOSTS = ("algo-1", "algo-2")
PROCESSES = 2
PROBE = Path(__file__).with_name("probe.py")
CODE: dict[str, Any] = {
    "args": {"seed": 0, "dropout": 0.0, "flag": True, "text": "two words", "out": "/opt/ml/model"},
    "env": {"PROBE_TEXT": "a 'quoted' text", "PROBE_PLACE": "/opt/ml/output/data"},
}
JOB = {
    "name": "probe",
    "cluster": {
        "instance_type": "ml.m5.xlarge",
        "instances": len(HOSTS),
        "processes_per_instance": PROCESSES,
    },
    "data": {"train": "data", "shared": {"uri": "data2", "sharded": True}},
}
ARGV = [
    "--seed",
    "0",
    "--dropout",
    "0.0",
    "--flag",
    "--text",
    "two words",
    "--out",
    "/opt/ml/model",
]
DATA = {
    "data/a.txt": "a",
    "data/deep/b c.txt": "b",
    "data2/one.bin": "1",
    "data2/two.bin": "2",
    "data2/x/y.bin": "3",
}

_OF_IMAGE = (
    *(
        "HOME",
        "PATH",
        "LANG",
        "LC_ALL",
        "LC_CTYPE",
        "TMPDIR",
        "TZ",
        "USER",
        "LD_LIBRARY_PATH",
        "PYTHONHASHSEED",
    ),
    *("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"),
    *("http_proxy", "https_proxy", "no_proxy", "PWD", "OLDPWD", "SHLVL", "_"),
)
DIFFERENT = {
    **dict.fromkeys(
        _OF_IMAGE, "set by the container's image or by bash; in a local run by this machine"
    ),
    **dict.fromkeys(
        (
            *(ADDRESSES_VARIABLE, PORT_VARIABLE, RENDEZVOUS_FILE_VARIABLE),
            *("MASTER_ADDR", "MASTER_PORT"),
        ),
        "addresses and ports",
    ),
    "TORCHELASTIC_ERROR_FILE": "torchrun creates a temporary folder",
    "TORCHINDUCTOR_CACHE_DIR": "set if a test of the same session has imported torch's compiler",
    "TRAINING_JOB_ARN": "names an account and a region, which a local run does not have",
    ML_ROOT_VARIABLE: "not set in SageMaker, where the tree is /opt/ml itself",
    INSTANCE_VARIABLE: "names the folder of a local run's instance on this machine",
    CARDS_VARIABLE: "GPUs of the machine that the hosts of a local run share",
    GPUS_VARIABLE: "a local run shares the GPUs of one machine among the hosts",
    "OMP_NUM_THREADS": "a local run shares the CPUs of one machine among the hosts",
    HOSTS_HERE_VARIABLE: "number of the hosts that share this machine",
    GRACE_VARIABLE: "a sandbox can have a shorter time for a stop than SageMaker",
    MAX_PROCESSES_VARIABLE: "the sandbox's limit of ranks per host",
}
"""Variables that may differ, with the reason.

AWS_* (credentials, region, endpoint) and the URIs of the bundle and the checkpoints may differ, too: these are folders
in a local run, and S3 objects elsewhere. In local and sandbox runs a channel is a link to its folder, which saves a
copy. The probe follows links.
"""

DIFFERENT_IN_RUN_JSON = {
    "key": "hosts on one machine agree through a file",
    "bucket_owners": "a local run uses no buckets of the account",
    "network_gbps": "the network of an instance type, which this machine does not have",
    "request": "a digest of the request, which names folders in a local run",
}


@dataclass(frozen=True)
class Seen:
    """The records of the ranks, and the results of the hosts.

    Attributes:
        ranks: Record of the probe by rank.
        failed: Events of failed ranks, as (host, exit code).
        failures: Content of the failure file by host.
        models: Files in the model folder by host, after the run.
    """

    ranks: dict[int, dict[str, Any]]
    failed: list[tuple[str, int]]
    failures: dict[str, str]
    models: dict[str, list[str]]


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Serve a sandbox that `submit --sandbox` finds by CLOUDTRAIN_HOME."""
    with serve(tmp_path_factory.mktemp("home") / "sandbox") as served:
        yield served


@pytest.fixture(scope="module", autouse=True)
def _without_gpus() -> Iterator[None]:
    """Hide this machine's GPUs, because the job's instance type has none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        yield


def write_job(folder: Path, barriers: Path, entry: Mapping[str, str], code: int) -> Path:
    """Write a job whose probe, the entry, ends with an exit code."""
    for name, text in DATA.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "probe.py").write_bytes(PROBE.read_bytes())
    (folder / "tool.sh").write_text("#!/bin/sh\n")
    (folder / "tool.sh").chmod(0o755)
    (folder / "package").mkdir()
    (folder / "package" / "__init__.py").touch()
    (folder / "package" / "probe.py").write_bytes(PROBE.read_bytes())
    env = {**CODE["env"], "PROBE_BARRIERS": str(barriers), "PROBE_EXIT": str(code)}
    path = folder / "job.yaml"
    path.write_text(json.dumps({**JOB, "code": {**CODE, **entry, "env": env}}))
    return path


def read_seen(
    trees: Mapping[str, MlTree], root: Mapping[str, str], run: str, lines: list[str]
) -> Seen:
    """Return the records of a run, with fixed words in place of the run id and the folders of the hosts."""

    def normal(value: Any, host: str) -> Any:
        if isinstance(value, str):
            return value.replace(root[host], "/opt/ml").replace(run, "RUN")
        if isinstance(value, dict):
            return {name: normal(each, host) for name, each in value.items()}
        return [normal(each, host) for each in value] if isinstance(value, list) else value

    ranks = {}
    for host, tree in trees.items():
        for path in tree.output_data.glob("probe-*.json"):
            ranks[int(path.stem.partition("-")[2])] = normal(json.loads(path.read_text()), host)
    events = [
        event
        for event in map(parse_event, lines)
        if event is not None and event["event"] == "failed" and not event["secondary"]
    ]
    return Seen(
        dict(sorted(ranks.items())),
        sorted({(event["host"], event["exit_code"]) for event in events}),
        {
            host: normal(tree.failure.read_text(), host)
            for host, tree in trees.items()
            if tree.failure.exists()
        },
        {host: sorted(path.name for path in tree.model.iterdir()) for host, tree in trees.items()},
    )


def seen_roots(trees: Mapping[str, MlTree]) -> dict[str, str]:
    """Return the path under which each host's processes see its tree."""
    if mount_namespace.is_available():
        return dict.fromkeys(trees, "/opt/ml")
    return {host: str(tree.root) for host, tree in trees.items()}


def run_locally(cli: Cli, job: Path) -> tuple[int, Seen]:
    done = cli("submit", job, "--local", "--follow", "--json")
    folder = Path(done.json["artifacts"]["folder"])
    trees = {host: MlTree(folder / "hosts" / host / "opt" / "ml") for host in HOSTS}
    lines = [
        line
        for host in HOSTS
        for line in (folder / "logs" / f"{host}.log").read_text().splitlines()
    ]
    return done.code, read_seen(trees, seen_roots(trees), done.json["run"], lines)


def run_in_sandbox(cli: Cli, job: Path, sandbox: Served) -> tuple[int, str, Seen]:
    environ = {"CLOUDTRAIN_HOME": str(sandbox.home.parent)}
    done = cli("submit", job, "--sandbox", "--follow", "--json", environ=environ)
    run = done.json["run"]
    hosts = sandbox.home / "jobs" / run / "attempt-1" / "hosts"
    trees = {host: MlTree(hosts / host / "opt" / "ml") for host in HOSTS}
    lines = [line for host in HOSTS for line in sandbox.lines(run, host)]
    return done.code, run, read_seen(trees, seen_roots(trees), run, lines)


def create_ml_tree(tree: MlTree, description: Mapping[str, Any], host: str, s3: Any) -> None:
    """Create /opt/ml as SageMaker's documentation describes it, with channels downloaded from S3."""
    for folder in (tree.config, tree.model, tree.output_data, tree.checkpoints):
        folder.mkdir(parents=True)
    kind = description["ResourceConfig"]["InstanceType"]
    group = {
        "instance_group_name": "homogeneousCluster",
        "instance_type": kind,
        "hosts": list(HOSTS),
    }
    resources = {
        "current_host": host,
        "current_instance_type": kind,
        "current_group_name": "homogeneousCluster",
        "hosts": list(HOSTS),
        "instance_groups": [group],
        "network_interface_name": loopback_interface(),  # eth0 in SageMaker
    }
    channels = {}
    for channel in description["InputDataConfig"]:
        source = channel["DataSource"]["S3DataSource"]
        distribution = source["S3DataDistributionType"]
        channels[channel["ChannelName"]] = {
            "TrainingInputMode": "File",
            "S3DistributionType": distribution,
            "RecordWrapperType": "None",
        }
        bucket, prefix = split_uri(source["S3Uri"])
        keys = [
            each["Key"] for each in s3.list_objects_v2(Bucket=bucket, Prefix=prefix)["Contents"]
        ]
        share = keys[HOSTS.index(host) :: len(HOSTS)] if distribution == "ShardedByS3Key" else keys
        for key in share:
            path = tree.data / channel["ChannelName"] / key[prefix.rindex("/") + 1 :]
            path.parent.mkdir(parents=True, exist_ok=True)
            s3.download_file(bucket, key, str(path))
    files = {
        "resourceconfig": resources,
        "inputdataconfig": channels,
        "hyperparameters": description["HyperParameters"],
    }
    for name, content in files.items():
        (tree.config / f"{name}.json").write_text(json.dumps(content))


def run_entry_command(
    folder: Path, description: Mapping[str, Any], s3: Any
) -> tuple[dict[str, int], Seen]:
    """Run the request's entry command for each host. If this machine allows it, the tree is mounted at /opt/ml."""
    tools = folder / "bin"
    tools.mkdir(parents=True)
    (tools / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (tools / "python").chmod(0o755)
    algorithm = description["AlgorithmSpecification"]
    command = [*algorithm["ContainerEntrypoint"], *algorithm.get("ContainerArguments", [])]
    is_mounted = mount_namespace.is_available()
    of_tests = (
        "PYTHONPATH",
        "CLOUDTRAIN_TEST_GUARD",
        "CLOUDTRAIN_TEST_RECORD",
        "ATEN_CPU_CAPABILITY",
    )
    image = {
        name: os.environ[name] for name in (*of_tests, "CUDA_VISIBLE_DEVICES") if name in os.environ
    }
    port = str(free_port())
    trees = {host: MlTree(folder / host / "ml") for host in HOSTS}
    started = {}
    for host, tree in trees.items():
        create_ml_tree(tree, description, host, s3)
        environ = {
            **image,
            "PATH": f"{tools}:{os.environ['PATH']}",
            "HOME": str(folder),
            "TRAINING_JOB_NAME": description["TrainingJobName"],
            "TRAINING_JOB_ARN": description["TrainingJobArn"],
            # The names of the hosts do not resolve on this machine.
            ADDRESSES_VARIABLE: json.dumps(host_addresses(HOSTS)),
            PORT_VARIABLE: port,
            **({} if is_mounted else {ML_ROOT_VARIABLE: str(tree.root)}),
            **description["Environment"],
        }
        argv = mount_namespace.wrap(str(tree.root), command) if is_mounted else command
        with (folder / f"{host}.log").open("wb") as log:
            started[host] = subprocess.Popen(
                argv, env=environ, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
    try:
        codes = {host: process.wait(300) for host, process in started.items()}
    finally:
        for process in started.values():
            process.kill()
            process.wait()
    lines = [line for host in HOSTS for line in (folder / f"{host}.log").read_text().splitlines()]
    return codes, read_seen(trees, seen_roots(trees), description["TrainingJobName"], lines)


def comparable(seen: Seen) -> dict[int, dict[str, Any]]:
    """Return the records of the ranks without the values that may differ."""
    found = copy.deepcopy(seen.ranks)
    for record in found.values():
        for name in [
            name for name in record["environment"] if name in DIFFERENT or name.startswith("AWS_")
        ]:
            del record["environment"][name]
        # On a machine that others use, too, Python processes record what they write to.
        path = record["environment"].pop("PYTHONPATH", "").split(os.pathsep)
        record["environment"]["PYTHONPATH"] = [each for each in path if each != "/opt/ml/start"]
        del record["config"]["hyperparameters.json"]["sagemaker_submit_directory"]
        del record["run"]["checkpoint"]["uri"]
        for name in DIFFERENT_IN_RUN_JSON:
            record["run"].pop(name, None)
    return found


@pytest.mark.promise
@pytest.mark.parametrize(
    ("entry", "code"), [({"script": "probe.py"}, 0), ({"module": "package.probe"}, 3)]
)
def test_a_script_sees_the_same_everywhere(
    cli: Cli, sandbox: Served, tmp_path: Path, entry: dict[str, str], code: int
) -> None:
    barriers = tmp_path / "barriers"
    job = write_job(tmp_path / "job", barriers, entry, code)
    local_code, local = run_locally(cli, job)
    shutil.rmtree(barriers)
    sandbox_code, run, sent = run_in_sandbox(cli, job, sandbox)
    shutil.rmtree(barriers)
    description = sandbox.describe(run)
    entry_codes, entered = run_entry_command(tmp_path / "entry", description, sandbox.client("s3"))

    assert list(local.ranks) == list(range(len(HOSTS) * PROCESSES))
    file = "package/probe.py" if "module" in entry else "probe.py"
    assert local.ranks[0]["argv"] == [f"/opt/ml/code/{file}", *ARGV]
    assert local.ranks[0]["first of sys.path"] == "/opt/ml/code"
    assert comparable(local) == comparable(sent) == comparable(entered)
    assert local.models == sent.models == entered.models == {host: ["model.txt"] for host in HOSTS}
    assert local.failed == sent.failed == entered.failed == ([("algo-1", code)] if code else [])
    cause = {"algo-1": "rank 0 on algo-1 (local rank 0) ended with exit code 3"} if code else {}
    assert local.failures == sent.failures == entered.failures == cause
    assert (local_code, sandbox_code) == ((4, 4) if code else (0, 0))
    assert entry_codes == dict.fromkeys(HOSTS, 1 if code else 0)
    assert ("exit code: 1" in description.get("FailureReason", "")) == bool(code)
