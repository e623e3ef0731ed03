"""Fuzzed logs: whatever a job's program prints, its run is supervised to the end, and every reader shows it.

The logs are random, from fixed seeds. Kinds and fields come from the schemas, so that new ones are covered, too.
"""

from __future__ import annotations

import ast
import itertools
import json
import random
import traceback
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from support.sizes import sample, tries

import cloudtrain_runtime
from cloudtrain.backends.container.event_tail import EventTail
from cloudtrain.backends.container.failure_reason import find_cause
from cloudtrain.backends.container.job_folder import JobFolder
from cloudtrain.backends.container.state_file import RecordedState, write_state
from cloudtrain.backends.local.backend import LocalBackend
from cloudtrain.console.follow_screen import EventThinner, state_line
from cloudtrain.console.runs import explanation_rows, format_log_line, print_runs, status_rows
from cloudtrain.failure_rules import explain_run
from cloudtrain.features.costs.sums import measure_lost_work
from cloudtrain.features.dashboard.model_cards import model_card
from cloudtrain.features.dashboard.page import report_page
from cloudtrain.features.dashboard.run_record import RunRecord, run_document, run_row
from cloudtrain.features.evaluation.output import print_evaluation, print_ranking
from cloudtrain.features.rehearsal.runs import Ended
from cloudtrain.runs.comparison import compare_runs, known_evaluations, read_plan
from cloudtrain.runs.evaluations import rank_evaluations
from cloudtrain.runs.history import read_history
from cloudtrain.runs.progress import _FOLDS, Progress
from cloudtrain.runs.run import Run
from cloudtrain.runs.status import State
from cloudtrain_runtime.contract import parse_event
from cloudtrain_runtime.contract.events import EVENTS
from cloudtrain_runtime.contract.json_checks import MismatchError, Validator

RUN = "odd-261120-101500-1a2b3c"
GOOD = "good-261120-101400-1a2b3c"
NOW = 1_763_633_700.0

VALUES: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 12, 3, 0.5, 1e308, -1e308, 1e-308, 2**53, 2**53 + 1, 2**63 - 1, 2**64, 10**400,
    NOW, NOW + 1, 253_402_300_799.5, float("nan"), float("inf"), "", "x", "12", "low", "3 %", "validation", "algo-1",
    "algo-2", "file:///c/step-00000012", "\ud800", "\x00\x1b[2J", "a\nb", "x" * 5_000, [], {}, [None], [[]], [[9]],
    [[1, 2], [3]], [0.5], [1, 2], ["x"], ["x", 1], {"x": 1}, {"x": 1e308}, {"x": None}, {"x": "y"}, {"": {"": 0.5}},
    {"a/b/c": 0.5}, {"data": 0.1, "forward": 1e308, "backward": -1e308}, {"data": 0}, {"data": "3 %"},
    {"torch": "2.13.0"}, [{}], [{"path": "out/", "files": 2, "bytes": 9}], [{"path": "o", "files": -1, "bytes": 9}],
    [{"name": "x", "support": 9, "precision": 1.0, "recall": None, "f1": 0.5}], [{"name": "x", "support": 9}],
    [{"name": ["x"], "support": 9}],
)  # fmt: skip
"""Values of every type that a schema accepts, and odd ones."""

NESTED = ("[" * 30 + "]" * 30, "[" * 20_000, '{"a":' * 30 + "1" + "}" * 30)
"""JSON texts that cannot be dumped: they replace a value."""

NAMES = sorted({name for kind in EVENTS.values() for name in (*kind.required, *kind.optional)})
"""Every field of any kind of event: a program can print each in each kind."""


LOGS = tries(320)

EVALUATION = {
    "version": 1, "run": "e-261120-101500-1a2b3c", "evaluated": f"local:{RUN}", "created": NOW, "step": 3,
    "weights": "file:///w", "data": {"test": "file:///d"},
    "splits": {
        "test": {
            "samples": 9, "metrics": {"accuracy": {"value": 0.5, "low": 0.4, "high": 0.6}},
            "classification": {
                "classes": [{"name": "x", "support": 9, "precision": 1.0, "recall": None, "f1": 0.5}],
                "most_confused": [{"true": "x", "predicted": "y", "count": 2}],
            },
            "calibration": {"expected_error": 0.1, "bins": []},
            "residuals": {"mean": 0.1, "mean_absolute": 0.2},
            "own": {"x": [1]},
        }
    },
}  # fmt: skip


def _passes(check: Validator, value: Any) -> bool:
    try:
        check(value)
    except MismatchError:
        return False
    return True


VALID: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    kind: {
        name: tuple(value for value in VALUES if _passes(check, value))
        for name, check in {**schema.optional, **schema.required}.items()
    }
    for kind, schema in EVENTS.items()
}


def fuzzed_event(chance: random.Random, kind: str) -> str:
    """Return an event line: most fields of the kind have a valid value, others any; some are missing or foreign."""
    fields: dict[str, Any] = {"event": kind}
    required = EVENTS[kind].required if kind in EVENTS else ()
    for name, valid in VALID.get(kind, {}).items():
        is_wanted = name in required or chance.random() < 0.6
        if name != "event" and is_wanted:
            is_valid = valid and chance.random() < (0.97 if name in required else 0.7)
            fields[name] = chance.choice(valid if is_valid else VALUES)
    for name in chance.sample(NAMES, chance.randrange(6)):
        fields.setdefault(name, chance.choice(VALUES))
    line = json.dumps(fields)
    if chance.random() < 0.05:
        line = f'{line[:-1]}, "more": {chance.choice(NESTED)}}}'
    return "CLOUDTRAIN " + line


def fuzzed_log(seed: int) -> bytes:
    """Return a log of some events, and of lines that only look like one."""
    chance = random.Random(seed)  # noqa: S311 (its logs must be the same in each run)
    kinds = [*EVENTS, "of-a-newer-version"]
    favourite = kinds[seed % len(kinds)]  # each kind is frequent in some logs
    lines = []
    for _ in range(25):
        line = fuzzed_event(chance, chance.choice([favourite, *kinds])).encode()
        cut = chance.random()
        if cut < 0.03:
            line = line[: chance.randrange(len(line))]
        elif cut < 0.06:
            line = line.replace(b"12", b"\xff\xfe")
        lines.append(line)
    return b"\n".join([b"[rank1]: ValueError: x", *lines, b"the last line"]) + b"\n"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a home with one run that has ended well."""
    home = tmp_path_factory.mktemp("fuzzed")
    for run in (GOOD, RUN):
        JobFolder(home / "runs" / run).logs.mkdir(parents=True)
    write_state(home / "runs" / GOOD, RecordedState(State.SUCCEEDED))
    return home


def test_the_values_include_valid_ones_of_each_field() -> None:
    lacking = [f"{kind}.{name}" for kind, own in VALID.items() for name in own if not own[name]]
    assert not lacking


def read_all(home: Path, state: State) -> Iterator[str]:
    """Read a run's log as every command does; yield the name of the next reader."""
    folder, backend = JobFolder(home / "runs" / RUN), LocalBackend(home)
    run = Run(RUN, backend)
    yield "supervisor"
    tail = EventTail({"algo-1": folder.log("algo-1")}, folder.events)
    tail.read()
    tail.close()
    write_state(folder.root, RecordedState(state, "exit code 1"))
    yield "status"
    status = run.status()
    json.dumps(status.to_json(NOW), allow_nan=False).encode()
    "".join(map("".join, status_rows(status, NOW))).encode()
    state_line(status)
    yield "repr"
    assert repr(status) + status._repr_html_()
    yield "list"
    found = [each for each in backend.list() if each.state is not State.UNKNOWN]
    assert [each.run for each in found] == [RUN, GOOD]
    print_runs(found, is_filtered=False)
    yield "logs"
    lines = list(run.logs())
    thinner = EventThinner(1.0)
    for line in lines:
        thinner.wants(parse_event(line.text))
        format_log_line(line)
    yield "metrics"
    history = read_history(run)
    json.dumps([history.to_json(RUN), history.rows()], allow_nan=False).encode()
    compare_runs([run, Run(GOOD, backend)]).to_json()
    yield "explain"
    explanation = explain_run(status, run.logs(), run.facts())
    explanation_rows(explanation, RUN)
    json.dumps(explanation.to_json(), allow_nan=False).encode()
    yield "dashboard and report"
    record = RunRecord.read(run)
    record.new_values({})
    page = run_document(run, record, status, read_plan(run))
    json.dumps([page, run_row(status, None)], allow_nan=False).encode()
    report_page("title", {"created": NOW, "documents": [page], "comparison": None}).encode()
    yield "card"
    model_card(run).encode()
    yield "costs"
    events = [event for line in lines if (event := parse_event(line.text)) is not None]
    measure_lost_work(events, NOW)
    yield "reason of a failure"
    find_cause(events, {"algo-1": folder.tree("algo-1").failure}, {"algo-1": 1})
    yield "rehearse"
    ended = Ended(run, status, events)
    assert [*ended.losses, ended.first_step, ended.last_step]


def test_no_fuzzed_log_breaks_a_reader(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = JobFolder(home / "runs" / RUN)
    states = (State.RUNNING, State.FAILED, State.SUCCEEDED)
    broken: dict[str, str] = {}
    for seed in range(LOGS):
        folder.log("algo-1").write_bytes(fuzzed_log(seed))
        folder.events.unlink(missing_ok=True)
        reader = ""
        try:
            for name in read_all(home, states[seed % len(states)]):
                reader = name
        except Exception as error:  # noqa: BLE001 (every kind of crash is reported once)
            place = traceback.extract_tb(error.__traceback__)[-1]
            broken.setdefault(
                f"{place.filename}:{place.lineno}: {error!r}", f"{reader}, log {seed}"
            )
    capsys.readouterr()
    assert not broken


def test_a_fault_in_progress_ends_no_run_and_no_list(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(progress: Progress, event: Mapping[str, Any]) -> Progress:
        raise TypeError(f"{progress.last_step} {event}")

    monkeypatch.setitem(_FOLDS, "best", fail)
    folder = JobFolder(home / "runs" / RUN)
    write_state(folder.root, RecordedState(State.SUCCEEDED))
    folder.events.unlink(missing_ok=True)
    folder.log("algo-1").write_text(
        'CLOUDTRAIN {"event": "best", "step": 1, "metric": "x"}\n', encoding="utf-8"
    )
    tail = EventTail({"algo-1": folder.log("algo-1")}, folder.events)
    tail.read()
    tail.close()
    assert b"best" in folder.events.read_bytes()
    odd, good = LocalBackend(home).list()
    assert (odd.run, odd.state, good.state) == (RUN, State.UNKNOWN, State.SUCCEEDED)
    assert "TypeError" in odd.reason


def test_every_field_that_the_runtime_emits_has_a_schema() -> None:
    foreign = []
    for path in Path(cloudtrain_runtime.__file__).parent.rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = getattr(call, "func", None)
            if not (
                isinstance(call, ast.Call) and isinstance(name, ast.Name) and name.id == "emit"
            ):
                continue
            kind = (
                call.args[0].value if call.args and isinstance(call.args[0], ast.Constant) else ""
            )
            if kind not in EVENTS or EVENTS[kind].others is not None:
                continue
            known = {*EVENTS[kind].required, *EVENTS[kind].optional}
            given = {each.arg for each in call.keywords if each.arg is not None}
            foreign += [f"{path.name}: {kind}.{each}" for each in given - known if each in NAMES]
    assert not foreign


def test_no_odd_result_of_an_evaluation_breaks_a_reader(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(RUN, LocalBackend(home))
    write_state(home / "runs" / RUN, RecordedState(State.SUCCEEDED))
    folder = home / "runs" / RUN / "evaluations"
    folder.mkdir(exist_ok=True)
    odd_values = (*VALUES, ["x" * 9] * 3)
    for path, value in sample(itertools.product(_paths(EVALUATION), odd_values)):
        content = json.dumps(_replaced(EVALUATION, path, value))
        (folder / "e.json").write_text(content, encoding="utf-8")
        for found in known_evaluations(run):
            print_evaluation(found)
            print_ranking(rank_evaluations([found]))
            json.dumps(found.to_json(), allow_nan=False).encode()
        model_card(run).encode()
    capsys.readouterr()
    (folder / "e.json").unlink()


def _paths(content: Any) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each value in nested JSON."""
    pairs: Iterable[tuple[Any, Any]] = ()
    if isinstance(content, dict):
        pairs = content.items()
    elif isinstance(content, list):
        pairs = enumerate(content)
    for name, value in pairs:
        yield (name,)
        yield from ((name, *rest) for rest in _paths(value))


def _replaced(content: Any, path: tuple[Any, ...], value: Any) -> Any:
    copied = json.loads(json.dumps(content))
    place = copied
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    return copied
