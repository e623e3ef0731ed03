"""The pages of docs/ match the product: job files, commands, fields and links in them exist."""

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from pydantic import BaseModel
from support.jobs import EXAMPLES, REPOSITORY, Cli

from cloudtrain.backends.sandbox.fault_injection import FaultPlan
from cloudtrain.cli import cli as group
from cloudtrain.cli.checkpoints import checkpoints
from cloudtrain.job.spec import JobSpec

DOCS = REPOSITORY / "docs"
OTHERS = {"decisions", "_build", "examples", "files", "changelog.md", "contributing.md"}
"""Decisions have a test of their own; the rest is what a build of the site leaves: copies of what is elsewhere."""
PAGES = {
    str(path.relative_to(DOCS)): path.read_text()
    for path in sorted(DOCS.rglob("*.md"))
    if not OTHERS & set(path.relative_to(DOCS).parts)
}
GENERATED = {
    f"reference/{name}.md"
    for name in ("job-yaml", "request", "command-line", "permissions", "mistakes", "gpu", "errors")
} | {name for name in PAGES if name.startswith("reference/commands/")}
"""Pages generated from code or figures. They name every field, so they do not prove that it is explained."""
PROSE = "\n".join(text for name, text in PAGES.items() if name not in GENERATED)
LONGEST_PAGE_LINES = 500
MODULES_PAGE = "reference/modules.md"
"""A generated list."""


def blocks(language: str) -> Iterator[tuple[str, str]]:
    """Yield each code block of a language with the name of its page."""
    for name, text in PAGES.items():
        for block in re.findall(
            rf"^ *```{language}\n(.*?)^ *```$", text, flags=re.DOTALL | re.MULTILINE
        ):
            yield name, block


YAML = [block for _, block in blocks("yaml")]
SWEEPS = [block for block in YAML if "\nspace:\n" in block]
JOBS = [block for block in YAML if block.startswith("name: ") and block not in SWEEPS]
(FULL_JOB,) = (
    block for name, block in blocks("yaml") if name == "how-to/job-file.md" and block in JOBS
)
(FAULTS,) = (block for block in YAML if "capacity_after_seconds" in block)
WORKFLOWS = [block for block in YAML if block.startswith("# .github/workflows/")]
PARTS = [block for block in YAML if block not in (*JOBS, *SWEEPS, *WORKFLOWS, FAULTS)]


def test_full_job_validates_and_plans(cli: Cli, job: Callable[..., Path]) -> None:
    code = "class GPT(Task):\n    def __init__(self, layers): ...\n"
    path = job(FULL_JOB, gpt_py=code, **{"requirements.txt": "numpy"})
    assert cli("validate", path).err == ""
    assert (
        cli("plan", path, "--region", "us-west-2", "--json").json["batch"]["global"] == 16 * 4 * 16
    )


@pytest.mark.parametrize("text", JOBS)
def test_every_job_file_validates(
    cli: Cli, job: Callable[..., Path], tmp_path: Path, text: str
) -> None:
    code = yaml.safe_load(text)["code"]
    module = code.get("module", code.get("task", "")).partition(":")[0]
    file = code.get("script", module.replace(".", "/") + ".py")
    (tmp_path / "job" / file).parent.mkdir(parents=True)
    name = code.get("task", "").partition(":")[2]
    path = job(
        text,
        train_py="",
        **{file: f"class {name}(Task): ...\n" if name else "", "requirements.txt": "numpy"},
    )
    assert cli("validate", path).err == ""


@pytest.mark.parametrize("part", PARTS)
def test_parts_of_a_job_validate(cli: Cli, job: Callable[..., Path], part: str) -> None:
    document = yaml.safe_load(FULL_JOB)
    for section, content in yaml.safe_load(part).items():
        document[section] = {**document.get(section, {}), **content}
    path = job(
        yaml.safe_dump(document), gpt_py="class GPT(Task): ...\n", **{"requirements.txt": "numpy"}
    )
    for folder in document["code"].get("include", ()):
        (path.parent / folder).mkdir()
    assert cli("validate", path).err == ""


@pytest.mark.parametrize("text", SWEEPS)
def test_every_sweep_file_plans(cli: Cli, tmp_path: Path, text: str) -> None:
    digits = EXAMPLES / "digits"
    job = (digits / "job.yaml").read_text().replace("{task:", f"{{directory: {digits}, task:")
    (tmp_path / "job.yaml").write_text(job)
    (tmp_path / "sweep.yaml").write_text(text)
    done = cli("sweep", "plan", tmp_path / "sweep.yaml", "--json")
    assert done.code == 0, done.err
    assert set(yaml.safe_load(text)["space"]) == set(done.json["space"])


def test_sandbox_faults_show_every_field() -> None:
    document = yaml.safe_load(FAULTS)
    FaultPlan.from_document(document)
    assert list(document) == list(FaultPlan.model_fields)


@pytest.mark.parametrize("text", WORKFLOWS)
def test_workflows_have_steps_and_run_known_commands(text: str) -> None:
    document = yaml.safe_load(text)
    assert document[True], "YAML 1.1 reads the key `on` as true"
    steps = [step for job in document["jobs"].values() for step in job["steps"]]
    assert all(len({"uses", "run"} & step.keys()) == 1 for step in steps)
    commands = [line for step in steps for line in COMMAND.findall(step.get("run", ""))]
    assert commands
    for line in commands:
        test_every_command_exists_with_its_options(line)


def fields(model: Any) -> set[str]:
    names = set()
    for name, field in model.model_fields.items():
        names.add(name)
        for kind in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                names |= fields(kind)
    return names


def test_every_field_is_shown() -> None:
    for name in fields(JobSpec):
        assert re.search(rf"\b{name}:", PROSE), name


def test_every_command_is_named() -> None:
    documents = PROSE + (REPOSITORY / "README.md").read_text()
    for name in group.list_commands(click.Context(group)):
        assert f"cloudtrain {name}" in documents, name
    for name in checkpoints.commands:
        assert name == "list" or f"cloudtrain checkpoints {name} " in PROSE, name


SHELL = "".join(block for language in ("sh", "console") for _, block in blocks(language))
COMMAND = re.compile(
    r"^ *(?:\$ )?(?:\w+=\S* )*(?:\w+=\$\()?(cloudtrain .*?)\)?$", flags=re.MULTILINE
)
COMMANDS = sorted(set(COMMAND.findall(SHELL)))


@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_exists_with_its_options(line: str) -> None:
    context = click.Context(group)
    command: click.Command = group
    allowed: set[str] = set(context.help_option_names)
    for word in re.split(r"\s#\s|\s[|>]\s", line)[0].split()[1:]:
        allowed |= {
            option
            for parameter in command.params
            for option in (*parameter.opts, *parameter.secondary_opts)
        }
        if word.startswith("-"):
            assert word.partition("=")[0] in allowed, f"{line}: {word}"
        elif (
            isinstance(command, click.Group)
            and (found := command.get_command(context, word)) is not None
        ):
            command = found
    assert command is not group or line == "cloudtrain --version", line


@pytest.mark.parametrize("block", [block for _, block in blocks("python")])
def test_every_python_snippet_is_valid(block: str) -> None:
    ast.parse(block)


@pytest.mark.parametrize("name", PAGES)
def test_every_link_to_a_file_resolves(name: str) -> None:
    """The build checks links between pages; this one also checks links to the rest of the repository."""
    for link in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", PAGES[name]):
        assert ((DOCS / name).parent / link).exists(), link


@pytest.mark.parametrize("name", sorted(set(PAGES) - {MODULES_PAGE}))
def test_every_page_is_short(name: str) -> None:
    assert len(PAGES[name].splitlines()) <= LONGEST_PAGE_LINES
