"""`cloudtrain init` writes jobs that are valid, whose schema fits, and that train at once."""

import importlib.util
import json
from pathlib import Path

import jsonschema
import pytest
import yaml
from support.jobs import Cli

from cloudtrain.features.setup.new_job import TEMPLATES

PACKAGES = {"lightning": "lightning", "accelerate": "accelerate", "huggingface": "transformers"}


@pytest.mark.promise
@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_is_a_valid_job_with_its_schema(cli: Cli, tmp_path: Path, template: str) -> None:
    written = cli("init", tmp_path / "My first_job", "--template", template, "--json").json
    folder = Path(written["folder"])
    assert {"job.yaml", "README.md", ".cloudtrainignore", "job.schema.json"} < set(written["files"])
    assert set(written["files"]) == {path.name for path in folder.iterdir()}
    text = (folder / "job.yaml").read_text()
    assert text.startswith("# yaml-language-server: $schema=job.schema.json\n")
    spec = yaml.safe_load(text)
    assert spec["name"] == "My-first-job"
    jsonschema.validate(spec, json.loads((folder / "job.schema.json").read_text()))
    done = cli("validate", folder / "job.yaml")
    assert done.code == 0, done.err
    sent = {entry["name"] for entry in cli("files", folder / "job.yaml", "--json").json["files"]}
    assert sent & set(written["files"]) == set(written["files"]) - {"README.md", "job.schema.json"}
    readme = (folder / "README.md").read_text()
    assert not {"NAME", "DESCRIPTION", "INSTALL"} & set(readme.replace(":", " ").split())


@pytest.mark.processes
@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_trains_at_once(cli: Cli, tmp_path: Path, template: str) -> None:
    if template in PACKAGES and importlib.util.find_spec(PACKAGES[template]) is None:
        pytest.skip(f"NOT TESTED: {template} is not installed here (make test-all)")
    folder = tmp_path / "first"
    assert cli("init", folder, "--template", template).code == 0
    done = cli("submit", "job.yaml", "--local", "--follow", "--json", cwd=folder)
    assert done.code == 0, done.err
    status = done.json
    assert status["state"] == "SUCCEEDED"
    assert status["last_step"] == status["total_steps"] > 0
    assert status["metrics"]["train/loss"] < (0.2 if template != "huggingface" else 3.9)
    assert status["artifacts"]["model"]
    if template not in ("lightning", "huggingface"):
        assert status["last_checkpoint"]["step"] == status["last_step"]


def test_an_existing_file_is_never_overwritten(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("mine")
    (tmp_path / "README.md").symlink_to("missing")
    done = cli("init", tmp_path)
    assert done.code == 2
    assert "job.yaml, README.md" in done.err
    assert (tmp_path / "job.yaml").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "home") == [
        "README.md",
        "job.yaml",
    ]


def test_a_wrong_template_is_refused(cli: Cli, tmp_path: Path) -> None:
    done = cli("init", tmp_path / "new", "--template", "scrpt")
    assert done.code == 2
    assert "script" in done.err
    assert not (tmp_path / "new").exists()
