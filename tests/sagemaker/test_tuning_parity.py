"""The request of a tuning job equals what the SDK's HyperparameterTuner sends with a PyTorch estimator."""

import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.estimator import boto_session, sdk_session
from support.jobs import serve_moto
from support.parity_cases import BY_HAND, DIGEST, FACTORS, Case, by_hand, job_text, settings

from cloudtrain.backends.sagemaker.estimator import compare
from cloudtrain.backends.sagemaker.target import SageMakerTarget
from cloudtrain.catalog import bundled_prices
from cloudtrain.features.sweeps.loader import LoadedSweep, load_sweep
from cloudtrain.features.sweeps.tuning_request import check_tuning, render_tuning
from cloudtrain.planning.plan import CodeInfo, Plan
from cloudtrain.planning.planner import make_plan
from cloudtrain.settings.settings import Settings

pytestmark = [
    pytest.mark.aws,
    pytest.mark.filterwarnings("ignore"),
]  # warnings of the SDK, none about what we call

CREATE = "sagemaker.CreateHyperParameterTuningJob"
NOW = datetime(2026, 11, 20, 10, 15, 0, tzinfo=UTC)
BASE: Case = {factor: next(iter(levels)) for factor, levels in FACTORS.items()}
SPACE = {
    "train.learning_rate": {"log_uniform": [1e-5, 0.01]},
    "train.clip_grad_norm": {"uniform": [0.5, 2.0]},
    "train.batch_size": {"choice": [16, 32]},
    "train.compile": {"choice": [True, False]},
    "train.accumulate": {"int": [1, 4]},
    "train.seed": {"log_int": [1, 1000]},
}
ARGUMENTS = {
    "code.args.lr": {"log_uniform": [1e-5, 0.01]},
    "code.args.optimizer": {"choice": ["adam", "sgd"]},
}


def sdk_ranges(space: Mapping[str, Any]) -> dict[str, Any]:
    """Return a space as a user of the SDK writes it."""
    from sagemaker.parameter import CategoricalParameter, ContinuousParameter, IntegerParameter

    kinds = {
        "choice": CategoricalParameter,
        "uniform": lambda bounds: ContinuousParameter(*bounds, scaling_type="Linear"),
        "log_uniform": lambda bounds: ContinuousParameter(*bounds, scaling_type="Logarithmic"),
        "int": lambda bounds: IntegerParameter(*bounds, scaling_type="Linear"),
        "log_int": lambda bounds: IntegerParameter(*bounds, scaling_type="Logarithmic"),
    }
    return {
        name: kinds[kind](values) for name, each in space.items() for kind, values in each.items()
    }


class Tuners:
    """Real tuners, with a record of the documents that they send."""

    def __init__(self, sdk: Any, client: Any) -> None:
        self._sdk = sdk
        self.bodies: list[dict[str, Any]] = []
        client.meta.events.register(f"before-call.{CREATE}", self._record)

    def _record(self, params: Mapping[str, Any], **_event: Any) -> None:
        self.bodies.append(json.loads(params["body"]))

    def fit(
        self, case: Case, name: str, identity: str, space: Mapping[str, Any], **arguments: Any
    ) -> dict[str, Any]:
        """Start one tuning job and return the document that left for the server."""
        from sagemaker.inputs import FileSystemInput, TrainingInput
        from sagemaker.pytorch import PyTorch
        from sagemaker.tuner import HyperparameterTuner

        of_estimator, channels = by_hand(case, name, identity)
        of_estimator.pop("container_entry_point", None)  # a tuning job cannot send it
        of_estimator.pop("checkpoint_s3_uri", None)  # all trials would share it
        channels.pop("code", None)  # the toolkit downloads the code itself
        inputs = {
            each: (FileSystemInput if "file_system_id" in channel else TrainingInput)(**channel)
            for each, channel in channels.items()
        }
        estimator = PyTorch(**of_estimator, sagemaker_session=self._sdk)
        metrics = arguments.pop("metric_definitions", BY_HAND["metric_definitions"])
        tuner = HyperparameterTuner(
            estimator,
            hyperparameter_ranges=sdk_ranges(space),
            metric_definitions=metrics,
            **arguments,
        )
        before = len(self.bodies)
        tuner.fit(inputs, job_name=name, wait=False)
        assert len(self.bodies) == before + 1
        return self.bodies[-1]


@pytest.fixture(scope="module")
def tuners(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tuners]:
    folder = tmp_path_factory.mktemp("tuning-parity")
    with serve_moto(folder / "moto.log") as endpoint, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", endpoint)
        patch.setenv("AWS_CONFIG_FILE", str(folder / "none"))
        patch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(folder / "none"))
        session = boto_session()
        client = session.client("sagemaker")
        with sdk_session(session, client) as sdk:
            yield Tuners(sdk, client)


def sweep_of(folder: Path, case: Case, space: Mapping[str, Any], **fields: Any) -> LoadedSweep:
    folder.joinpath("mine.py").write_text(
        "class Mine(Task):\n    def __init__(self, layers=2): ...\n"
    )
    folder.joinpath("train.py").write_text("")
    folder.joinpath("job.yaml").write_text(job_text(case))
    content = {
        "job": "job.yaml",
        "engine": "sagemaker",
        "space": dict(space),
        "objective": "validation/loss",
    }
    folder.joinpath("sweep.yaml").write_text(yaml.safe_dump({**content, "trials": 8, **fields}))
    return load_sweep(folder / "sweep.yaml")


def plan_of(sweep: LoadedSweep, case: Case) -> Plan:
    target = SageMakerTarget(Settings(**settings(case)), bundled_prices())
    return make_plan(sweep.job, CodeInfo(DIGEST, 1000, 3), target, now=NOW, suffix="1a2b3c")


def assert_equal_requests(
    tuners: Tuners, sweep: LoadedSweep, case: Case, space: Mapping[str, Any], **arguments: Any
) -> None:
    assert check_tuning(sweep) == []
    plan = plan_of(sweep, case)
    rendered = render_tuning(sweep, plan)
    sent = tuners.fit(case, rendered.name, plan.identity, space, **arguments)
    assert list(compare(rendered.request, sent)) == []


LEVELS = (
    {},
    {"distribution": "pytorchddp"},
    {"capacity": "spot-bounded", "tags": "two", "environment": "two", "cluster": "four"},
    {"network": "of-the-job", "data": "sharded", "key": "of-the-account"},
    {"network": "of-the-job", "data": "mounted", "output": "elsewhere-unpacked", "image": "own"},
)


@pytest.mark.parametrize("levels", LEVELS, ids=lambda levels: ",".join(levels.values()) or "plain")
def test_a_tuning_request_equals_that_of_a_tuner(
    tuners: Tuners, tmp_path: Path, levels: Case
) -> None:
    case = {**BASE, **levels}
    sweep = sweep_of(
        tmp_path, case, SPACE, strategy="random", parallel=2, seed=7, limits={"time": "2h"}
    )
    sent = {"max_jobs": 8, "max_parallel_jobs": 2, "random_seed": 7, "max_runtime_in_seconds": 7200}
    objective = {"objective_metric_name": "validation/loss", "objective_type": "Minimize"}
    assert_equal_requests(tuners, sweep, case, SPACE, strategy="Random", **sent, **objective)


def test_every_strategy_equals_that_of_a_tuner(tuners: Tuners, tmp_path: Path) -> None:
    from sagemaker.tuner import HyperbandStrategyConfig, StrategyConfig

    sent = {"max_parallel_jobs": 1, "random_seed": 0}
    accuracy = {"objective_metric_name": "validation/accuracy", "objective_type": "Maximize"}
    sweep = sweep_of(tmp_path, BASE, SPACE, objective="validation/accuracy", pruning="median")
    assert_equal_requests(
        tuners,
        sweep,
        BASE,
        SPACE,
        strategy="Bayesian",
        max_jobs=8,
        early_stopping_type="Auto",
        **sent,
        **accuracy,
    )
    few = {name: each for name, each in SPACE.items() if "choice" in each}
    sweep = sweep_of(
        tmp_path, BASE, few, objective="validation/accuracy", strategy="grid", trials=None
    )
    assert_equal_requests(tuners, sweep, BASE, few, strategy="Grid", max_jobs=4, **sent, **accuracy)
    sweep = sweep_of(
        tmp_path,
        BASE,
        SPACE,
        objective="validation/accuracy",
        strategy="hyperband",
        rungs={"first": 1},
    )
    config = StrategyConfig(HyperbandStrategyConfig(max_resource=3, min_resource=1))
    assert_equal_requests(
        tuners,
        sweep,
        BASE,
        SPACE,
        strategy="Hyperband",
        strategy_config=config,
        max_jobs=8,
        **sent,
        **accuracy,
    )


def test_a_script_is_searched_by_its_arguments(tuners: Tuners, tmp_path: Path) -> None:
    case = {**BASE, "entry": "script"}
    sweep = sweep_of(tmp_path, case, ARGUMENTS, strategy="random")
    objective = {"objective_metric_name": "validation/loss", "objective_type": "Minimize"}
    sent = {"strategy": "Random", "max_jobs": 8, "max_parallel_jobs": 1, "random_seed": 0}
    assert_equal_requests(tuners, sweep, case, ARGUMENTS, **sent, **objective)


def test_an_objective_of_a_task_gets_a_definition(tuners: Tuners, tmp_path: Path) -> None:
    sweep = sweep_of(
        tmp_path,
        BASE,
        SPACE,
        objective={"metric": "validation/f1", "goal": "max"},
        strategy="random",
    )
    regex = r'CLOUDTRAIN \{"event": "evaluation".*"split": "validation".*"f1": ([-+0-9.eE]+)'
    metrics = [*BY_HAND["metric_definitions"], {"Name": "validation/f1", "Regex": regex}]
    objective = {"objective_metric_name": "validation/f1", "objective_type": "Maximize"}
    sent = {"strategy": "Random", "max_jobs": 8, "max_parallel_jobs": 1, "random_seed": 0}
    assert_equal_requests(
        tuners, sweep, BASE, SPACE, metric_definitions=metrics, **sent, **objective
    )
