"""The Python API: one word for each thing, names in their modules, and clear errors for wrong arguments."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from support.jobs import EXAMPLES, REPOSITORY

import cloudtrain
from cloudtrain import Client, LogFilter, RunFilter, State, UserError
from cloudtrain.features.evaluation import EvaluationOptions
from cloudtrain.runs.downloads import RunStorage

FEATURES = ("evaluation", "rehearsal", "serving", "setup", "sweeps")
FEATURE_CALLS = (
    cloudtrain.costs,
    cloudtrain.deploy,
    cloudtrain.evaluate,
    cloudtrain.get_sweep,
    cloudtrain.list_endpoints,
    cloudtrain.model_card,
    cloudtrain.rehearse,
    cloudtrain.serve,
    cloudtrain.sweep,
    cloudtrain.undeploy,
)
OLD_WORDS = {"spec", "path", "reference", "references", "backends", "places", "choice"}
JOB = EXAMPLES / "digits" / "job.yaml"


def functions() -> list[Callable[..., Any]]:
    found = [getattr(cloudtrain, name) for name in cloudtrain.__all__]
    methods = [each for name, each in vars(Client).items() if not name.startswith("_")]
    return [each for each in (*found, *methods) if inspect.isfunction(each)]


@pytest.mark.parametrize("function", functions(), ids=lambda each: each.__qualname__)
def test_verbs_use_one_word_for_each_thing(function: Callable[..., Any]) -> None:
    assert OLD_WORDS & inspect.signature(function).parameters.keys() == set()


@pytest.mark.parametrize("function", FEATURE_CALLS, ids=lambda each: each.__name__)
def test_calls_of_features_take_settings_and_a_client(function: Callable[..., Any]) -> None:
    assert {"settings", "client"} <= inspect.signature(function).parameters.keys()


@pytest.mark.parametrize("feature", FEATURES)
def test_features_are_attributes(feature: str) -> None:
    module = getattr(cloudtrain, feature)
    assert module.__name__ == f"cloudtrain.features.{feature}"
    for name in module.__all__:
        assert getattr(module, name) is not None
    with pytest.raises(AttributeError, match=f"module 'cloudtrain.features.{feature}' has no"):
        _ = module.Nothing


def test_features_tell_type_checkers_their_names() -> None:
    for feature in FEATURES:
        module = getattr(cloudtrain, feature)
        tree = ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))
        typed = [
            alias.asname
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
            if alias.asname is not None
        ]
        assert sorted(typed) == module.__all__


def test_names_of_the_previews_warn_and_are_the_new_ones() -> None:
    text = (REPOSITORY / "docs" / "migrating.md").read_text(encoding="utf-8")
    table = text.partition("### Names of the Python API")[2].partition("###")[0]
    rows = re.findall(r"^\| (.+) \| `cloudtrain\.([\w.]+)` \|$", table, flags=re.MULTILINE)
    moved = [(name, module) for names, module in rows for name in re.findall(r"`(\w+)`", names)]
    assert len(moved) > 40
    for name, module in moved:
        if name in ("EvaluationChoice", "RehearsalOptions"):
            continue
        with pytest.warns(DeprecationWarning, match=f"from cloudtrain.{module} import {name}"):
            old = getattr(cloudtrain, name)
        assert old is getattr(importlib.import_module(f"cloudtrain.{module}"), name)


def test_errors_are_an_attribute_too() -> None:
    program = "import cloudtrain; print(cloudtrain.errors.DriftError.__name__)"
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert found.stdout == "DriftError\n"


def test_renamed_options_of_evaluations_warn() -> None:
    with pytest.warns(DeprecationWarning, match="from cloudtrain.features.evaluation import"):
        assert cloudtrain.EvaluationChoice is EvaluationOptions


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Sweeps'"):
        _ = cloudtrain.Sweeps


def test_old_arguments_warn_and_work(tmp_path: Path) -> None:
    with pytest.warns(DeprecationWarning, match=r"argument 'spec' of plan\(\) is 'job' now"):
        planned = cloudtrain.plan(spec=JOB, local=True)  # type: ignore[call-arg]
    assert planned.run.startswith("digits-")
    client = Client(home=tmp_path)
    with pytest.warns(DeprecationWarning, match="'backends'"):
        assert list(client.list_runs(backends=["local"])) == []  # type: ignore[call-arg]


def test_an_old_argument_beside_its_new_one_is_refused() -> None:
    with pytest.raises(TypeError, match="both 'job' and its old name 'spec'"):
        cloudtrain.plan(JOB, spec=JOB, job=JOB)  # type: ignore[call-arg, misc]


def test_new_names_do_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cloudtrain.plan(JOB, backend="local").run.startswith("digits-")


@pytest.mark.parametrize(
    "given", [{"local": True, "sandbox": True}, {"backend": "local", "sandbox": True}]
)
def test_two_backends_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="a run is in one backend, not in local and sandbox"):
        cloudtrain.submit(JOB, **given)


def test_a_backend_and_its_own_shorthand_are_one() -> None:
    assert cloudtrain.validate(JOB, backend="local", local=True) == cloudtrain.validate(JOB)


def test_an_unknown_backend_has_a_nearest_name() -> None:
    for call in (cloudtrain.plan, cloudtrain.validate, cloudtrain.submit, cloudtrain.rehearse):
        with pytest.raises(UserError, match="no backend 'lokal'") as caught:
            call(JOB, backend="lokal")
        assert "local" in caught.value.hint
    with pytest.raises(UserError, match="no backend 'lokal'"):
        cloudtrain.list_runs(backend="lokal")


def test_a_rehearsal_in_the_account_is_refused() -> None:
    with pytest.raises(UserError, match="on this machine, not on SageMaker"):
        cloudtrain.rehearse(JOB, backend="sagemaker")


def test_one_text_is_one_item(tmp_path: Path) -> None:
    assert EvaluationOptions(splits="test").splits == ("test",)  # type: ignore[arg-type]
    assert cloudtrain.validate(JOB, "train.epochs=3").train.epochs == 3  # type: ignore[union-attr]
    assert list(Client(home=tmp_path).list_runs(backend="local")) == []


def test_no_backend_is_none_and_not_all(tmp_path: Path) -> None:
    assert list(Client(home=tmp_path).list_runs(backend=[])) == []
    assert cloudtrain.costs(backend=[]).runs == ()
    assert cloudtrain.list_endpoints(backend=()) == ()


def test_changes_of_a_job_that_is_no_file_are_refused() -> None:
    spec = cloudtrain.JobSpec.from_yaml(JOB)
    for given in ({"overrides": ["train.epochs=3"]}, {"instances": 3}):
        with pytest.raises(UserError, match="change a job file, not a JobSpec"):
            cloudtrain.validate(spec, **given)  # type: ignore[arg-type]


def test_a_folder_means_its_job_file() -> None:
    assert cloudtrain.validate(JOB.parent) == cloudtrain.validate(JOB)


def test_a_time_without_a_zone_is_refused() -> None:
    naive = datetime(2026, 1, 1)  # noqa: DTZ001 (what a notebook has)
    with pytest.raises(UserError, match="since: 2026-01-01 00:00:00 has no time zone") as caught:
        RunFilter(since=naive)
    assert "timezone.utc" in caught.value.hint


def test_states_are_given_by_name_too() -> None:
    assert RunFilter(states="FAILED").states == {State.FAILED}
    assert RunFilter(states=["FAILED", State.RUNNING]).states == {State.FAILED, State.RUNNING}
    with pytest.raises(UserError, match="no state 'SUCEEDED'") as caught:
        RunFilter(states={"SUCEEDED"})
    assert "SUCCEEDED" in caught.value.hint


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: RunFilter(tags=["sweep"]), "tags: expected Mapping, got list"),  # type: ignore[arg-type]
        (lambda: RunFilter(name=3), "name: expected str, got int"),  # type: ignore[arg-type]
        (lambda: LogFilter(rank="0"), "rank: expected int, got str"),  # type: ignore[arg-type]
        (lambda: Client("us-west-2"), "settings: expected Settings, got str"),  # type: ignore[arg-type]
        (
            lambda: cloudtrain.plan(JOB, observer=cloudtrain.Observer),  # type: ignore[arg-type]
            "observer: expected Observer, got the class Observer",
        ),
        (
            lambda: cloudtrain.evaluate("run", {"splits": ["test"]}),  # type: ignore[arg-type]
            "options: expected EvaluationOptions, got dict",
        ),
        (
            lambda: cloudtrain.deploy("run", cloudtrain.serving.ServingOptions()),  # type: ignore[arg-type]
            "options: expected EndpointOptions, got ServingOptions",
        ),
        (
            lambda: cloudtrain.serve("run", cloudtrain.serving.EndpointOptions()),  # type: ignore[arg-type]
            "options: expected ServingOptions, got EndpointOptions",
        ),
        (
            lambda: cloudtrain.costs(client=Client),  # type: ignore[arg-type]
            "client: expected Client, got the class Client",
        ),
        (lambda: cloudtrain.compare("digits"), "a comparison needs several runs"),
        (lambda: cloudtrain.serve("run", port=99999), "there is no port 99999"),
        (lambda: cloudtrain.serve("run", port="8000"), "port: expected int, got str"),  # type: ignore[arg-type]
        (
            lambda: cloudtrain.validate(JOB, {"train.epochs": 3}),  # type: ignore[arg-type]
            "overrides are texts such as train.epochs=3, not a mapping",
        ),
        (
            lambda: cloudtrain.checkpoint_folder("./checkpoints").export("onnx"),
            "a checkpoint cannot be exported as 'onnx'",
        ),
        (
            lambda: cloudtrain.checkpoint_folder("./checkpoints").find("best"),  # type: ignore[arg-type]
            "'best' is no step of a checkpoint",
        ),
    ],
)
def test_an_argument_of_another_type_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        call()


def test_a_storage_shows_no_environment() -> None:
    storage = RunStorage("file:///tmp/run/output", {"AWS_SECRET_ACCESS_KEY": "secret"}, object)
    assert "secret" not in repr(storage)


def test_methods_that_forward_to_features_warn(tmp_path: Path) -> None:
    with pytest.warns(DeprecationWarning, match=r"use cloudtrain\.costs\(client=client\)"):
        Client(home=str(tmp_path)).costs(backend="local")


@pytest.mark.parametrize(
    "call",
    [
        lambda: RunFilter(since="3d"),  # type: ignore[arg-type]
        lambda: RunFilter(until=3),  # type: ignore[arg-type]
        lambda: cloudtrain.costs(since="3d"),  # type: ignore[arg-type]
        lambda: LogFilter(since="3d"),  # type: ignore[arg-type]
    ],
)
def test_a_time_of_another_type_is_refused(call: Callable[[], object]) -> None:
    with pytest.raises(UserError, match=r"(since|until): expected a datetime") as caught:
        call()
    assert "timedelta(days=3)" in caught.value.hint


def test_a_pattern_of_another_type_is_refused() -> None:
    with pytest.raises(UserError, match="grep: expected a pattern") as caught:
        LogFilter(grep="loss")  # type: ignore[arg-type]
    assert caught.value.hint == "for example re.compile('loss')"


def test_a_name_in_place_of_a_filter_is_refused() -> None:
    with pytest.raises(UserError, match="expected a RunFilter, got 'digits'") as caught:
        cloudtrain.list_runs("digits")  # type: ignore[arg-type]
    assert caught.value.hint == "for example RunFilter(name='digits')"
