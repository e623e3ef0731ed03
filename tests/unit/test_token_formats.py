"""Each format of tokens is found wherever one could leave this machine: job file, code, diff and logs."""

from __future__ import annotations

import json
import re
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import pytest
from support.fake_keys import MIXED, made_up
from support.jobs import EXAMPLES
from support.secret_texts import FOUND_IN_FILES, HIDDEN_IN_LOGS, SECRET_TEXTS

from cloudtrain.backends.sagemaker.target import SageMakerTarget
from cloudtrain.bundle.git_source import read_source
from cloudtrain.catalog.prices import bundled_prices
from cloudtrain.errors import SpecError
from cloudtrain.job.spec import JobSpec
from cloudtrain.planning.plan import CodeInfo
from cloudtrain.planning.planner import make_plan
from cloudtrain.secrets.scanner import scan_file, scan_text
from cloudtrain.secrets.values import contains_url_credentials
from cloudtrain.settings.settings import Settings
from cloudtrain_runtime.contract.redaction import REPLACEMENT, redact
from cloudtrain_runtime.contract.token_formats import FORMATS

JOB = EXAMPLES / "script-ddp" / "job.yaml"
CODE = CodeInfo(digest="0" * 64, bytes=1, files=1)
TARGET = SageMakerTarget(Settings(region="us-west-2"), bundled_prices())
each_text = pytest.mark.parametrize(("kind", "text", "secrets"), SECRET_TEXTS)
each_kind = pytest.mark.parametrize(
    ("kind", "text", "secrets"), {each.kind: each for each in reversed(SECRET_TEXTS)}.values()
)


def test_every_format_has_an_example() -> None:
    for each in FORMATS:
        pattern = re.compile(f"{each.begin}{each.value}")
        examples = [text for kind, text, _ in SECRET_TEXTS if kind == each.kind]
        assert any(map(pattern.search, examples)), each.kind
        assert all(
            any(needle in text.lower() for needle in each.needles.split())
            for text in examples
            if pattern.search(text)
        )


@each_text
def test_a_log_hides_it(kind: str, text: str, secrets: tuple[str, ...]) -> None:
    for shown in (redact(f"before {text} behind"), redact(f'{{"text": "{text}"}}')):
        assert not [secret for secret in secrets if secret in shown], kind
        assert REPLACEMENT in shown
        assert redact(shown) == shown


@each_kind
def test_a_job_that_contains_it_is_refused(kind: str, text: str, secrets: tuple[str, ...]) -> None:
    for place in ("code.env.NOTE", "tags.note"):
        spec = JobSpec.from_yaml(JOB, [f"{place}={json.dumps(text)}"])
        with pytest.raises(SpecError) as refused:
            make_plan(spec, CODE, TARGET, now=datetime.now(UTC), suffix="1a2b3c")
        assert place in [problem.path for problem in refused.value.problems], kind
        assert not [secret for secret in secrets if secret in str(refused.value)]


def test_a_file_that_contains_it_stops_the_submit() -> None:
    """The scanner's fast search reaches each place that a format fits, also between lines without any."""
    assert {each.kind for each in FOUND_IN_FILES} == {
        each.kind for each in FORMATS if each.in_files != ""
    }
    for kind, text, _ in FOUND_IN_FILES:
        assert scan_text(f"first\n\n{text}\n".encode())[:1] == [(3, kind)], text
    for _, text, _ in HIDDEN_IN_LOGS:
        assert scan_text(f"first\n\n{text}\n".encode()) == [], text


def test_credentials_in_urls_count_unless_a_placeholder_is_there() -> None:
    """In requirements and environment files a word is a password, too; logs also hide a placeholder."""
    for user in ("me:hunter", ":hunter", made_up(20, MIXED)):
        text = f"git+https://{user}@github.com/a/b.git"
        assert contains_url_credentials(text)
        assert scan_file("x.env", f"X={text}\n".encode())
        assert redact(text) != text
    for user in (
        "me:${WORD}",
        "me:<password>",
        "${TOKEN}",
        "git",
        "a-long-name-of-a-deploying-user",
    ):
        text = f"git+https://{user}@github.com/a/b.git"
        assert not contains_url_credentials(text)
        assert not scan_file("x.env", f"X={text}\n".encode())


@each_kind
def test_a_diff_does_not_show_it(
    tmp_path: Path, kind: str, text: str, secrets: tuple[str, ...]
) -> None:
    def git(*arguments: str) -> None:
        subprocess.run(["git", *arguments], cwd=tmp_path, check=True, capture_output=True)

    git("init", "-q")
    git("config", "user.email", "ada@example.com")
    git("config", "user.name", "Ada")
    file = tmp_path / "config.py"
    file.write_text("first\n")
    git("add", ".")
    git("commit", "-qm", "x")
    file.write_text(f"first\n{text}\n")
    source = read_source(tmp_path)
    assert source is not None
    assert "config.py" in source.diff, kind
    assert not [secret for secret in secrets if secret in source.diff]
