"""Model cards: metadata that Hugging Face's library reads, metrics with intervals, cost and limits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.jobs import Cli
from support.recorded_runs import step_events, write_run

RUN = "digits-261120-101500-000001"
EVALUATION = {
    "version": 1,
    "run": "digits-evaluation-261120-111500-000002",
    "evaluated": f"local:{RUN}",
    "created": 1_795_000_000.0,
    "step": 3,
    "data": {},
    "splits": {
        "test": {
            "samples": 100,
            "metrics": {
                "accuracy": {"value": 0.9, "low": 0.85, "high": 0.95},
                "loss": {"value": 0.3},
            },
            "classification": {
                "classes": [
                    {"name": "a|b", "precision": 0.5, "recall": None, "f1": 0.25, "support": 3}
                ]
            },
        }
    },
}


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """Write a run, and return the environment in which commands find it."""
    evaluated = {
        "event": "evaluation",
        "split": "validation",
        "step": 3,
        "loss": 0.5,
        "samples": 10,
    }
    write_run(tmp_path / "home", RUN, [*step_events(3), evaluated])
    return {"CLOUDTRAIN_HOME": str(tmp_path / "home")}


def test_a_card_without_an_evaluation_says_what_it_lacks(cli: Cli, environ: dict[str, str]) -> None:
    done = cli("card", RUN, environ=environ)
    assert done.code == 0, done.err
    assert "| validation/loss | 0.5 |  |  |" in done.out
    assert f"For intervals: `cloudtrain evaluate {RUN}`." in done.out
    assert "- There is no test split" in done.out
    assert "- The figures have no confidence intervals." in done.out
    assert "Trained on a machine of the user's own" in done.out


def test_a_card_of_the_best_weights_has_their_values(cli: Cli, tmp_path: Path) -> None:
    evaluations = [
        {"event": "evaluation", "split": "validation", "step": step, "loss": loss, "samples": 10}
        for step, loss in ((2, 0.4), (3, 0.5))
    ]
    finished = {"event": "finished", "epochs": 1, "seconds": 1.0, "best_step": 2}
    job = {"train": {"export": "best"}}
    write_run(tmp_path / "home", RUN, [*step_events(3), *evaluations, finished], job=job)
    done = cli("card", RUN, environ={"CLOUDTRAIN_HOME": str(tmp_path / "home")})
    assert done.code == 0, done.err
    assert "| validation/loss | 0.4 |  |  |" in done.out
    assert "| steps | 2 |" in done.out
    assert "Values of step 2, the best one" in done.out


def test_metrics_are_read_by_the_library_of_hugging_face(
    cli: Cli, environ: dict[str, str], tmp_path: Path
) -> None:
    folder = tmp_path / "home" / "runs" / RUN / "evaluations"
    folder.mkdir()
    (folder / "one.json").write_text(json.dumps(EVALUATION))
    (folder / "two.json").write_text("{")
    done = cli("card", RUN, "-o", tmp_path / "README.md", "--json", environ=environ)
    assert done.code == 0, done.err
    text = (tmp_path / "README.md").read_text()
    assert done.json == {"path": str(tmp_path / "README.md"), "card": text}
    data = pytest.importorskip("huggingface_hub").ModelCard(text).data
    assert (data.library_name, data.model_name, data.tags) == ("pytorch", "digits", ["cloudtrain"])
    found = {
        (each.metric_type, each.metric_value, each.dataset_split)
        for each in data.eval_results or ()
    }
    assert found == {("accuracy", 0.9, "test"), ("loss", 0.3, "test")}
    assert "| test/accuracy | 0.9 | 0.85 | 0.95 |" in text
    assert "| a/b | 0.5000 |  | 0.2500 | 3 |" in text
    report = tmp_path / "report.html"
    assert cli("report", RUN, "-o", report, environ=environ).code == 0
    assert "| test/accuracy | 0.9 | 0.85 | 0.95 |" in report.read_text()
    again = cli("card", RUN, "-o", tmp_path / "README.md", environ=environ)
    assert (again.code, "README.md exists already" in again.err) == (2, True)
    refused = cli("card", RUN, "-o", tmp_path / "README.md" / "below.md", environ=environ)
    assert (refused.code, "cannot be written" in refused.err) == (2, True)
