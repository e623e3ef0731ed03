"""The rendered request equals what a real estimator sends: one built by hand, and cloudtrain's own."""

import copy
import dataclasses
import itertools
import json
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from support.estimator import (
    CREATE,
    boto_session,
    sdk_session,
    settings_checked_once,
)
from support.jobs import serve_moto
from support.parity_cases import (
    CASES,
    DIGEST,
    EBS,
    FACTORS,
    Case,
    by_hand,
    combinations,
    is_refused,
    job_text,
    settings,
)

from cloudtrain.backends.sagemaker.backend import SageMakerBackend
from cloudtrain.backends.sagemaker.estimator import DriftGuard, compare, send_by_estimator
from cloudtrain.backends.sagemaker.target import SageMakerTarget
from cloudtrain.catalog import bundled_prices
from cloudtrain.errors import DriftError
from cloudtrain.job.spec import JobSpec
from cloudtrain.planning.plan import CodeInfo, Plan
from cloudtrain.planning.planner import make_plan
from cloudtrain.settings.settings import Settings

pytestmark = [
    pytest.mark.aws,
    # The SageMaker SDK's own warnings; none of them is about what we call.
    pytest.mark.filterwarnings("ignore"),
]

TASK = """\
name: demo
code: {task: "mine:Mine", env: {A: "b"}}
cluster: {instance_type: ml.p4d.24xlarge, instances: 2}
train: {epochs: 3}
"""
SCRIPT = """\
name: demo
code: {script: train.py, args: {lr: 0.1}}
cluster: {instance_type: ml.g5.xlarge}
"""
FILES = {"mine_py": "class Mine(Task):\n    def __init__(self, layers=2): ...\n", "train_py": ""}
PLAN = "arn:aws:sagemaker:us-west-2:123456789012:training-plan/november"
DATASET = "arn:aws:sagemaker:us-west-2:123456789012:hub-content/hub/DataSet/tokens/1.0.0"
NOW = datetime(2026, 11, 20, 10, 15, 0, tzinfo=UTC)
RUN = "demo-261120-101500-1a2b3c"
ACCOUNT = Settings(
    role="arn:aws:iam::123456789012:role/training", bucket="cloudtrain-test", region="us-west-2"
)

PlanOf = Callable[..., Plan]


@pytest.fixture
def plan_of(job: Callable[..., Path]) -> PlanOf:
    def plan(
        text: str, overrides: list[str] | None = None, account: Settings = ACCOUNT, run: str = RUN
    ) -> Plan:
        spec = JobSpec.from_yaml(job(text, **FILES), overrides or [])
        target = SageMakerTarget(account, bundled_prices())
        return make_plan(spec, CodeInfo(DIGEST, 1000, 3), target, now=NOW, suffix=run[-6:])

    return plan


def canonical(document: Any) -> Any:
    """Sort lists of objects, whose order has no meaning for AWS."""
    if isinstance(document, dict):
        return {key: canonical(value) for key, value in document.items()}
    if isinstance(document, list) and document and isinstance(document[0], dict):
        return sorted(
            (canonical(item) for item in document),
            key=lambda item: json.dumps(item, sort_keys=True),
        )
    return document


class Estimators:
    """Real estimators built from a user's arguments, with a record of the documents that they send."""

    def __init__(self, sdk: Any, client: Any) -> None:
        self._sdk = sdk
        self.client = client
        self.bodies: list[dict[str, Any]] = []
        client.meta.events.register(f"before-call.{CREATE}", self._record)

    def _record(self, params: Mapping[str, Any], **_event: Any) -> None:
        self.bodies.append(json.loads(params["body"]))

    def fit(self, case: Case, run: str, identity: str, **changes: Any) -> dict[str, Any]:
        """Send one job, with some arguments changed, and return the document that left for the server."""
        from sagemaker.debugger import TensorBoardOutputConfig
        from sagemaker.inputs import FileSystemInput, TrainingInput
        from sagemaker.pytorch import PyTorch

        arguments, channels = by_hand(case, run, identity)
        arguments |= changes
        if "tensorboard_output_config" in arguments:
            arguments["tensorboard_output_config"] = TensorBoardOutputConfig(
                **arguments["tensorboard_output_config"]
            )
        estimator = PyTorch(**arguments, sagemaker_session=self._sdk)
        before = len(self.bodies)
        inputs = {
            name: (FileSystemInput if "file_system_id" in channel else TrainingInput)(**channel)
            for name, channel in channels.items()
        }
        estimator.fit(inputs, wait=False, job_name=run)
        assert len(self.bodies) == before + 1
        return self.bodies[-1]


@pytest.fixture(scope="module")
def estimators(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Estimators]:
    """Share one server and one session, because starting them takes longer than the jobs."""
    folder = tmp_path_factory.mktemp("parity")
    with serve_moto(folder / "moto.log") as endpoint, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", endpoint)
        patch.setenv("AWS_CONFIG_FILE", str(folder / "none"))
        patch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(folder / "none"))
        session = boto_session()
        client = session.client("sagemaker")
        with sdk_session(session, client) as sdk:
            yield Estimators(sdk, client)


def name_of(case: Case) -> str:
    return ",".join(case.values())


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_a_job_equals_what_an_estimator_built_by_hand_sends(
    estimators: Estimators, plan_of: PlanOf, case: Case
) -> None:
    run = f"demo-261120-101500-{CASES.index(dict(case)):06x}"
    plan = plan_of(job_text(case), account=Settings(**settings(case)), run=run)
    sent = estimators.fit(case, run, plan.identity)
    assert list(compare(plan.request, sent)) == []
    assert canonical(plan.request) == canonical(sent)


def test_the_key_of_a_volume_is_sent_where_aws_takes_one(
    estimators: Estimators, plan_of: PlanOf
) -> None:
    case = {factor: next(iter(values)) for factor, values in FACTORS.items()} | {
        "key": "of-the-account"
    }
    run = "demo-261120-101500-eb5000"
    overrides = [f"{path}={value}" for path, value in EBS.job.items()]
    plan = plan_of(job_text(case), overrides, account=Settings(**settings(case)), run=run)
    assert "VolumeKmsKeyId" in plan.request["ResourceConfig"]
    assert canonical(plan.request) == canonical(
        estimators.fit(case, run, plan.identity, **EBS.arguments)
    )


def test_every_value_and_every_three_values_together_occur() -> None:
    assert len(CASES) >= 60
    assert len({name_of(case) for case in CASES}) == len(CASES)
    for strength in (1, 2, 3):
        seen = {combination for case in CASES for combination in combinations(case, strength)}
        wanted = {
            tuple(zip(names, values, strict=True))
            for names in itertools.combinations(FACTORS, strength)
            for values in itertools.product(*(FACTORS[name] for name in names))
        }
        assert seen == {each for each in wanted if not is_refused(dict(each))}


def test_every_value_changes_the_request(plan_of: PlanOf) -> None:
    """The cases of a value that does not change the request would prove nothing."""
    # With a network, which file systems and private registries need.
    base = {factor: next(iter(values)) for factor, values in FACTORS.items()} | {
        "network": "of-the-job"
    }

    def request_of(case: Case) -> dict[str, Any]:
        request = plan_of(job_text(case), account=Settings(**settings(case))).request
        # This tag contains a digest of the request, so it always differs.
        return {
            **request,
            "Tags": [tag for tag in request["Tags"] if tag["Key"] != "cloudtrain:request"],
        }

    plain = request_of(base)
    for factor, values in FACTORS.items():
        for value in [value for value in values if value != base[factor]]:
            case = {**base, factor: value}
            assert request_of(case) != plain, (factor, value)


FULL: Case = {
    "distribution": "torch_distributed",
    "image": "private",
    "capacity": "spot-bounded",
    "network": "of-the-account-and-closed",
    "data": "mounted",
    "output": "elsewhere-unpacked",
    "entry": "script-with-tensorboard",
    "cluster": "four",
    "key": "of-the-account",
    "tags": "two",
    "environment": "two",
}
"""A job that has every field but the warm pool's, which spot excludes."""
FIELDS = (
    "AlgorithmSpecification",
    "CheckpointConfig",
    "EnableInterContainerTrafficEncryption",
    "EnableManagedSpotTraining",
    "EnableNetworkIsolation",
    "Environment",
    "HyperParameters",
    "InputDataConfig",
    "OutputDataConfig",
    "ProfilerConfig",
    "ResourceConfig",
    "RetryStrategy",
    "RoleArn",
    "StoppingCondition",
    "Tags",
    "TensorBoardOutputConfig",
    "TrainingJobName",
    "VpcConfig",
)

_NAMES = ("ChannelName", "Key", "Name")
"""Fields that identify the items of a list. An item without its name counts as another item."""

Leaf = tuple[str | int, ...]


def leaves(document: Any, path: Leaf = ()) -> Iterator[Leaf]:
    """Yield the path of every value that is neither a mapping nor a list."""
    if isinstance(document, dict | list):
        for key, value in document.items() if isinstance(document, dict) else enumerate(document):
            yield from leaves(value, (*path, key))
    else:
        yield path


def planted(document: dict[str, Any], path: Leaf) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield copies of a document with one difference at a path, after its kind: changed, removed or added."""
    for kind in ("changed", "removed", "added"):
        copied = copy.deepcopy(document)
        target: Any = copied
        for key in path[:-1]:
            target = target[key]
        value = target[path[-1]]
        if kind == "removed":
            del target[path[-1]]
        elif kind == "added" and isinstance(target, list):
            target.append("surprise")
        elif kind == "added":
            target["Surprise"] = "surprise"
        else:
            target[path[-1]] = (not value) if isinstance(value, bool) else value + type(value)(1)
        yield kind, copied


def full_plan(plan_of: PlanOf, case: Case = FULL, run: str = RUN) -> dict[str, Any]:
    return plan_of(job_text(case), account=Settings(**settings(case)), run=run).request


@pytest.mark.promise
def test_the_full_job_has_every_field(plan_of: PlanOf) -> None:
    assert sorted(full_plan(plan_of)) == sorted(FIELDS)


@pytest.mark.parametrize("field", FIELDS)
def test_a_difference_in_any_value_is_reported_by_name(plan_of: PlanOf, field: str) -> None:
    """The guard stops the call and names the value, whether it was changed, removed or added."""
    others = ({"capacity": "warm"}, {"capacity": "training-plan", "data": "sharded"})
    documents = [full_plan(plan_of), *(full_plan(plan_of, {**FULL, **other}) for other in others)]
    for sent in [document for document in documents if field in document]:
        for path in leaves(sent[field], (field,)):
            for kind, plan in planted(sent, path):
                found = list(compare(plan, sent))
                assert found, (path, kind)
                # A value added beside a top-level value is another top-level field.
                assert all(
                    line.startswith("Surprise" if kind == "added" and path == (field,) else field)
                    for line in found
                )
                if kind == "removed" and path[-1] not in _NAMES and isinstance(path[-1], str):
                    assert path[-1] in found[0]
                with pytest.raises(DriftError) as caught:
                    DriftGuard(plan)(copy.deepcopy(sent))
                assert all(line in caught.value.message for line in found)


@pytest.mark.promise
@pytest.mark.parametrize("field", FIELDS)
def test_drift_stops_the_estimator_before_it_sends(
    estimators: Estimators, plan_of: PlanOf, field: str
) -> None:
    """The guard is registered as in the backend. The estimator is built by hand, so it takes nothing from the plan."""
    run = f"demo-261120-101500-{0xD00000 + FIELDS.index(field):06x}"
    request = full_plan(plan_of, run=run)
    identity = next(tag["Value"] for tag in request["Tags"] if tag["Key"] == "cloudtrain:request")
    _, plan = next(planted(request, next(leaves(request[field], (field,)))))
    guard = DriftGuard(plan)
    event = f"provide-client-params.{CREATE}"
    estimators.client.meta.events.register(event, guard)
    before = len(estimators.bodies)
    try:
        with pytest.raises(DriftError) as caught:
            estimators.fit(FULL, run, identity)
    finally:
        estimators.client.meta.events.unregister(event, guard)
    _, *differences = caught.value.message.splitlines()
    assert differences
    assert all(line.strip().startswith(field) for line in differences)
    assert len(estimators.bodies) == before


VARIANTS: dict[str, tuple[str, list[str]]] = {
    "torch_distributed": (TASK, []),
    "script": (SCRIPT, []),
    "script-pytorchddp": (
        SCRIPT,
        ["cluster.distribution=pytorchddp", "cluster.instance_type=ml.p4d.24xlarge"],
    ),
    "isolated-smdistributed": (
        SCRIPT,
        [
            *("cluster.network.isolation=true", "cluster.distribution=smdistributed"),
            *("cluster.instance_type=ml.p4d.24xlarge", "cluster.instances=2"),
        ],
    ),
    "older-framework": (TASK, ["cluster.framework=2.8"]),
    "cpu": (TASK, ["cluster.instance_type=ml.m5.xlarge"]),
    # v2 has no argument for this field; the hook adds it.
    "preferences": (
        TASK.replace(
            "instance_type: ml.p4d.24xlarge", "prefer: [ml.p4d.24xlarge, ml.p4de.24xlarge]"
        ),
        [],
    ),
    "mlflow": (
        SCRIPT,
        ["tracking.mlflow=arn:aws:sagemaker:us-west-2:123456789012:mlflow-tracking-server/mine"],
    ),
    "training-plans": (
        TASK.replace(
            "instance_type: ml.p4d.24xlarge, instances: 2",
            f"prefer: [{{instance_type: ml.p4d.24xlarge, instances: 4, training_plan: '{PLAN}'}}, ml.p5.48xlarge], "
            "instances: 4",
        ),
        [],
    ),
    "request": (
        SCRIPT,
        [
            "data.train=s3://my-bucket/train",
            "request.ExperimentConfig={ExperimentName: demo}",
            "request.ProfilerConfig={DisableProfiler: false, S3OutputPath: 's3://my-bucket/profile'}",
            "request.AlgorithmSpecification={EnableSageMakerMetricsTimeSeries: true}",
            (
                "request.InputDataConfig=[{ChannelName: train, ContentType: text/csv}, "
                f"{{ChannelName: set, DataSource: {{DatasetSource: {{DatasetArn: '{DATASET}'}}}}}}]"
            ),
        ],
    ),
    "public-image": (
        TASK,
        ["cluster.image=public.ecr.aws/deep-learning-containers/pytorch:2.13-cu133-amzn2023"],
    ),
    "notify": (SCRIPT, ["notify.sns=arn:aws:sns:us-west-2:123456789012:training"]),
    "pending": (TASK, ["cluster.max_pending=6h", "limits.cost=500 USD"]),
}


@dataclasses.dataclass(frozen=True)
class Account:
    """A session of a moto account, and the CreateTrainingJob requests that it has sent."""

    session: Any
    client: Any
    requests: list[dict[str, Any]]


@pytest.fixture
def account(aws: dict[str, str]) -> Iterator[Account]:
    session = boto_session()
    client = session.client("sagemaker")
    requests: list[dict[str, Any]] = []
    client.meta.events.register(
        f"before-parameter-build.{CREATE}", lambda params, **_: requests.append(params)
    )
    with settings_checked_once():
        yield Account(session, client, requests)


@pytest.mark.promise
def test_our_own_estimator_sends_the_plan(plan_of: PlanOf, account: Account) -> None:
    for index, (name, variant) in enumerate(VARIANTS.items()):
        plan = plan_of(*variant, run=f"demo-261120-101500-{index:06x}")
        send_by_estimator(plan, account.session, account.client)
        assert canonical(account.requests[-1]) == canonical(plan.request), name
    assert len(account.requests) == len(VARIANTS)


@pytest.mark.promise
def test_the_sdk_uses_neither_its_own_bucket_nor_telemetry(
    plan_of: PlanOf, account: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bucket's name, sagemaker-REGION-ACCOUNT, can be guessed, so another account may own it."""
    import requests
    from sagemaker.session import Session

    called: list[str] = []
    for name in ("default_bucket", "create_bucket_for_not_exist_error"):
        assert hasattr(Session, name)
        monkeypatch.setattr(Session, name, lambda *_, name=name, **__: called.append(name))
    monkeypatch.setattr(requests.Session, "send", lambda *_, **__: called.append("telemetry"))
    calls: list[str] = []
    account.session.events.register("before-call.s3", lambda model, **_: calls.append(model.name))
    for index, variant in enumerate(VARIANTS.values()):
        send_by_estimator(
            plan_of(*variant, run=f"demo-261120-101500-{index:06x}"),
            account.session,
            account.client,
        )
    assert (called, calls) == ([], [])


@pytest.mark.parametrize("case", CASES[::8], ids=name_of)
def test_our_own_estimator_sends_what_a_hand_built_one_does(
    plan_of: PlanOf, account: Account, case: Case
) -> None:
    plan = plan_of(job_text(case), account=Settings(**settings(case)))
    send_by_estimator(plan, account.session, account.client)
    assert canonical(account.requests[-1]) == canonical(plan.request)


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        (("ResourceConfig", "VolumeSizeInGB"), 31, None),
        (("Environment", "EXTRA"), "x", None),
        (
            ("HyperParameters", "sagemaker_region"),
            '"eu-west-1"',
            "HyperParameters.sagemaker_region: planned",
        ),
        (
            ("HyperParameters", "sagemaker_job_name"),
            '"another"',
            "HyperParameters.sagemaker_job_name: planned",
        ),
        (
            ("HyperParameters", "sagemaker_container_log_level"),
            "10",
            "HyperParameters.sagemaker_container_log_level",
        ),
        (("HyperParameters", "mine"), "1", "HyperParameters.mine: planned '1', not sent"),
        (
            ("AlgorithmSpecification", "TrainingInputMode"),
            "Pipe",
            "AlgorithmSpecification.TrainingInputMode: planned",
        ),
        (
            ("ProfilerConfig", "DisableProfiler"),
            False,
            "ProfilerConfig.DisableProfiler: planned False, sent True",
        ),
        (("EnableNetworkIsolation",), False, "EnableNetworkIsolation: planned False, not sent"),
        (("Surprise",), 1, "Surprise: planned 1, not sent"),
    ],
)
def test_what_the_estimator_decides_itself_must_equal_the_plan(
    plan_of: PlanOf, account: Account, path: tuple[str, ...], value: Any, expected: str | None
) -> None:
    """A value that the estimator takes from the plan cannot differ."""
    plan = plan_of(*VARIANTS["torch_distributed"])
    target = plan.request
    for part in path[:-1]:
        target = target[part]
    target[path[-1]] = value
    if expected is None:
        send_by_estimator(plan, account.session, account.client)
        return
    with pytest.raises(DriftError) as caught:
        send_by_estimator(plan, account.session, account.client)
    assert expected in caught.value.message
    assert account.client.list_training_jobs()["TrainingJobSummaries"] == []


def test_the_sdk_prints_nothing_and_leaves_the_exception_hook(
    plan_of: PlanOf, aws: dict[str, str]
) -> None:
    """In a fresh process, where the SDK is imported for the first time."""
    plan = plan_of(*VARIANTS["torch_distributed"])
    program = (
        "import boto3, pickle, sys\n"
        "from cloudtrain.backends.sagemaker.estimator import send_by_estimator\n"
        "hook = sys.excepthook\n"
        "plan = pickle.load(sys.stdin.buffer)\n"
        "session = boto3.Session()\n"
        "send_by_estimator(plan, session, session.client('sagemaker'))\n"
        "assert 'sagemaker.pytorch' in sys.modules\n"
        "assert sys.excepthook is hook\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=pickle.dumps(plan),
        capture_output=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout == b""


@pytest.mark.promise
def test_without_the_sdk_the_same_document_is_sent(
    plan_of: PlanOf, aws: dict[str, str], tmp_path: Path
) -> None:
    from cloudtrain.bundle.archive import Bundle

    account = dataclasses.replace(ACCOUNT, transport="boto3")
    plan = plan_of(*VARIANTS["preferences"], account)
    archive = tmp_path / "sourcedir.tar.gz"
    archive.write_bytes(b"code")
    session = boto_session()
    requests: list[dict[str, Any]] = []
    session.events.register(
        f"before-parameter-build.{CREATE}", lambda params, **_: requests.append(params)
    )
    SageMakerBackend(account, session=session).submit(plan, Bundle(archive, plan.bundle))
    assert requests == [plan.request]
