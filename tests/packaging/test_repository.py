"""The files around the code: license, continuous integration, pre-commit hooks, root documents."""

import importlib.metadata
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.jobs import REPOSITORY

pytestmark = pytest.mark.promise

WORKFLOWS = REPOSITORY / ".github" / "workflows"
WORKFLOW = WORKFLOWS / "ci.yml"
RELEASE = WORKFLOWS / "release.yml"
ROOT_DOCUMENTS = sorted(path for path in REPOSITORY.glob("*.md"))


def read_yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def test_wheel_names_and_contains_the_license() -> None:
    distribution = importlib.metadata.distribution("cloudtrain")
    assert distribution.metadata["License-Expression"] == "Apache-2.0 AND MIT"
    text = distribution.read_text("licenses/LICENSE")
    assert text == (REPOSITORY / "LICENSE").read_text(encoding="utf-8")
    assert "Version 2.0, January 2004" in text


def test_ci_workflow_runs_only_make_targets() -> None:
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    jobs = read_yaml(WORKFLOW)["jobs"]
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    targets = [re.fullmatch(r'make ([\w-]+) TORCH="\$TORCH"', command) for command in commands]
    assert all(targets), commands
    names = {target[1] for target in targets if target is not None}
    assert {"check", "test", "test-all"} <= names
    assert all(re.search(rf"^{name}:", makefile, flags=re.MULTILINE) for name in names)


@pytest.mark.parametrize("workflow", sorted(WORKFLOWS.iterdir()), ids=lambda path: path.name)
def test_actions_are_pinned_by_their_commit(workflow: Path) -> None:
    """A tag can be moved to other code."""
    jobs = read_yaml(workflow)["jobs"]
    used = {step["uses"] for job in jobs.values() for step in job["steps"] if "uses" in step}
    assert used
    assert {each for each in used if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", each)} == set()


def test_a_release_is_built_by_the_make_target() -> None:
    document = read_yaml(RELEASE)
    # YAML 1.1 reads the key `on` as true.
    assert document[True] == {"push": {"tags": ["v*"]}}
    steps = document["jobs"]["build"]["steps"]
    on_main = 'git merge-base --is-ancestor "$GITHUB_SHA" origin/main'
    assert [step["run"] for step in steps if "run" in step] == [on_main, "make release"]
    uploaded = " ".join(step["with"]["path"] for step in steps if "upload" in step.get("uses", ""))
    assert uploaded.split() == ["dist/*.whl", "dist/*.tar.gz", "dist/*.cdx.json", "dist/SHA256SUMS"]


def test_only_the_job_that_publishes_may_publish() -> None:
    document = read_yaml(RELEASE)
    assert document["permissions"] == {}
    build, publish = document["jobs"]["build"], document["jobs"]["publish"]
    assert document["jobs"].keys() == {"build", "publish"}
    assert build["permissions"] == {"contents": "read"}
    assert build["steps"][0]["with"] == {"persist-credentials": False, "fetch-depth": 0}
    assert publish["permissions"] == {"id-token": "write"}
    assert (publish["needs"], publish["environment"]) == ("build", "pypi")
    # It runs no command, so no code of the repository or of a package from an index.
    names = [step["uses"].partition("@")[0] for step in publish["steps"]]
    assert names == ["actions/download-artifact", "pypa/gh-action-pypi-publish"]
    settings = publish["steps"][1]["with"]
    assert settings["attestations"] is True
    assert settings.keys().isdisjoint({"user", "password"})


def test_pre_commit_hooks_run_the_tools_of_the_venv() -> None:
    repositories = read_yaml(REPOSITORY / ".pre-commit-config.yaml")["repos"]
    assert [repository["repo"] for repository in repositories] == ["local"]
    for hook in repositories[0]["hooks"]:
        assert hook["language"] == "system"
        assert (REPOSITORY / hook["entry"].split()[0]).exists()


@pytest.mark.parametrize("form", ["bug.yml", "feature.yml"])
def test_issue_forms_have_unique_ids(form: str) -> None:
    fields = read_yaml(REPOSITORY / ".github" / "ISSUE_TEMPLATE" / form)["body"]
    ids = [field["id"] for field in fields if "id" in field]
    assert len(ids) == len(set(ids)) > 0


@pytest.mark.parametrize("document", ROOT_DOCUMENTS, ids=lambda path: path.name)
def test_links_of_root_documents_exist(document: Path) -> None:
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", document.read_text(encoding="utf-8")):
        assert (REPOSITORY / link).exists(), link
