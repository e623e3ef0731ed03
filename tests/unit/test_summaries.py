"""What `repr` and notebooks show of public objects: short, printable, escaped, without secrets."""

import re
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from support.fake_keys import KEY_ID
from support.jobs import EXAMPLES
from support.run_logs import LoggedRun

import cloudtrain
from cloudtrain import Check, JobSpec, Run, State, Status
from cloudtrain.console.status_fields import metrics_row
from cloudtrain.errors import CloudError
from cloudtrain.failure_rules import Explanation, FailureClass
from cloudtrain.features.rehearsal.report import Rehearsal
from cloudtrain.runs.notebook_list import MOST_ROWS, RunList
from cloudtrain.runs.progress import Progress, fold_events
from cloudtrain.support.checks import failed, passed
from cloudtrain.support.notebook.summary import Summary

EVIL = 'x\x1b[31m</td><script>alert("1")</script>\nnext & <b>'
RUN = "digits-261120-101500-1a2b3c"
EVENTS = [
    {"event": "started", "step": 0, "total_steps": 100},
    {"event": "step", "step": 60, "time": 1.0, "loss": 1.5, "samples_per_second": 3.0},
    {"event": "evaluation", "split": "test", "step": 60, "accuracy": None},
]


def job() -> JobSpec:
    return JobSpec.from_yaml(EXAMPLES / "digits" / "job.yaml")


def status() -> Status:
    started = datetime(2026, 11, 20, 10, 15, tzinfo=UTC)
    return Status(
        RUN,
        "sagemaker",
        State.RUNNING,
        EVIL,
        started=started,
        cost_usd=2.5,
        progress=fold_events(EVENTS),
    )


def explanation() -> Explanation:
    traceback = ("Traceback:", EVIL)
    return Explanation(
        RUN,
        State.FAILED,
        FailureClass.USER_CODE,
        EVIL,
        "fix it",
        "algo-1",
        0,
        60,
        traceback,
        (0, 1),
    )


def rehearsal() -> Rehearsal:
    proven = [passed(f"check {number}", "it holds") for number in range(9)]
    return Rehearsal((*proven, failed("resumes", EVIL)))


OBJECTS: dict[str, Callable[[], Any]] = {
    "job": job,
    "evil_job": lambda: job().with_values({"tags": {"team": EVIL, EVIL: 1}}),
    "plan": lambda: cloudtrain.plan(job()),
    "local_plan": lambda: cloudtrain.plan(job(), local=True),
    "files": lambda: cloudtrain.files(job()),
    "run": lambda: Run(RUN, LoggedRun(), attached=True, warnings=[EVIL]),
    "status": status,
    "check": lambda: failed("quota", EVIL, EVIL),
    "explanation": explanation,
    "rehearsal": rehearsal,
}


class Cells(HTMLParser):
    """Collects the tags and the text of HTML, and rejects tags that are not balanced."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        del attrs
        self.tags.append(tag)
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize("name", OBJECTS)
def test_text_has_one_to_ten_printable_lines(name: str) -> None:
    shown = OBJECTS[name]()
    lines = repr(shown).split("\n")
    assert 1 <= len(lines) <= 10
    assert all(line.isprintable() and len(line) <= 200 for line in lines), lines
    assert lines[0].startswith(f"{type(shown).__name__} ")
    assert str(shown) == repr(shown)


@pytest.mark.parametrize("name", OBJECTS)
def test_html_is_a_table_with_escaped_values(name: str) -> None:
    cells = Cells(OBJECTS[name]()._repr_html_())
    assert set(cells.tags) == {"table", "caption", "tbody", "tr", "th", "td"}
    assert "\x1b" not in cells.text
    assert ('<script>alert("1")</script>' in cells.text) == (
        name in ("evil_job", "run", "check", "explanation", "rehearsal")
    )


def test_html_has_no_colour_of_its_own() -> None:
    """The colours are those of the page, so that the table works on light and dark pages."""
    colours = set(re.findall(r"(?:color|background)\s*:\s*([^;\"]+)", status()._repr_html_()))
    assert colours == {"inherit", "transparent"}


def test_status_shows_progress_and_metrics() -> None:
    assert repr(status()).splitlines()[:4] == [
        f"Status sagemaker:{RUN}",
        "  state     RUNNING",
        "  progress  60/100 steps",
        "  metrics   train/loss 1.5, test/accuracy not finite",
    ]
    assert "  cost      2.50 USD" in repr(status())


def test_a_plan_shows_cost_and_the_first_warning() -> None:
    text = repr(
        cloudtrain.plan(job().with_values({"cluster.volume": "20GB", "cluster.instances": 2}))
    )
    assert re.search(
        r"  cluster +2 instances of ml.p4d.24xlarge, 16 ranks, torch_distributed\n", text
    )
    assert re.search(
        r"  cost +\d+\.\d\d USD per hour, estimate \d+\.\d\d USD at the time limit", text
    )


def test_the_text_of_a_run_needs_no_call() -> None:
    run = Run(RUN, LoggedRun(statuses=[RuntimeError("a call")]))
    assert repr(run) == f"Run local:{RUN}"


def test_a_notebook_shows_the_state_the_curve_and_links_of_a_run() -> None:
    events = [
        {"event": "started", "step": 0, "total_steps": 3},
        *[{"event": "step", "step": step, "time": 1.0, "loss": 4.0 - step} for step in (1, 2, 3)],
        {"event": "tracking", "tracker": "mlflow", "url": "https://example.com/run"},
    ]
    known = Status(RUN, "local", State.RUNNING, progress=fold_events(events))
    shown = Run(RUN, LoggedRun(events, [known]))._repr_html_()
    assert "RUNNING" in shown
    assert 'aria-label="training loss: 1 at step 3"' in shown
    assert 'd="M2.0,2.0L160.0,32.0L318.0,62.0"' in shown
    assert "run.follow()" in shown
    assert '<a href="https://example.com/run" target="_blank" rel="noopener">mlflow</a>' in shown


def test_a_run_whose_state_is_not_known_is_shown() -> None:
    shown = Run(RUN, LoggedRun(statuses=[CloudError("AWS cannot be reached", "try again")]))
    assert "not known: AWS cannot be reached" in shown._repr_html_()


def test_secrets_are_not_shown() -> None:
    spec = job().with_values({"code.env": {"TOKEN": "hunter2hunter2"}, "tags.key": KEY_ID})
    for text in (repr(spec), spec._repr_html_()):
        assert "TOKEN" in text
        assert "hunter2" not in text
        assert KEY_ID not in text


def test_a_long_list_of_files_is_shortened(tmp_path: Path) -> None:
    for number in range(100):
        (tmp_path / f"module_{number:03}.py").write_text("")
    (tmp_path / "train.py").write_text("")
    spec = JobSpec(
        name="many", code={"script": "train.py", "directory": str(tmp_path)}, cluster=job().cluster
    )
    contents = cloudtrain.files(spec)
    assert "101 files: module_000.py, module_001.py, module_002.py, ..." in repr(contents)
    assert "and 81 more files" in contents._repr_html_()


def test_many_rows_are_cut_to_ten_lines() -> None:
    lines = Summary("title", [("warning", "text")] * 30).to_text().splitlines()
    assert len(lines) == 10
    assert lines[-1].strip() == "..."


def test_a_passed_check_has_one_line() -> None:
    check: Check = passed("role", "can be assumed")
    assert repr(check) == "Check role passed: can be assumed"


def test_a_rehearsal_shows_first_what_is_not_proven() -> None:
    lines = repr(rehearsal()).splitlines()
    assert lines[0] == "Rehearsal failed"
    assert lines[1].startswith("  resumes  failed: x")


def test_a_list_of_runs_is_a_list_with_a_table() -> None:
    runs = RunList([status()] * (MOST_ROWS + 2))
    assert isinstance(runs, list)
    assert runs[0].run == RUN
    table = runs._repr_html_()
    assert table.count(RUN) == MOST_ROWS
    assert "102 runs" in table
    assert "2 older runs" in table
    assert "RUNNING" in table
    assert "0 runs" in RunList()._repr_html_()


def test_a_status_has_the_same_metrics_on_each_screen() -> None:
    metrics = {
        "train/aux": 2.0,
        "validation/loss": 0.5,
        "test/accuracy": None,
        "train/loss": 1.0,
        "train/grad_norm": 3.0,
        "train/data_wait": 0.1,
    }
    shown = replace(status(), progress=Progress(metrics=metrics))
    texts = ["train/loss 1", "test/accuracy not finite", "validation/loss 0.5", "train/aux 2"]
    assert metrics_row(shown) == ("metrics", "  ".join(texts))
    assert ", ".join(texts) in repr(shown)
    assert ", ".join(texts) in repr(RunList([shown]))
