"""Each format of tokens is found wherever one could leave this machine: job file, code, diff and logs."""

from __future__ import annotations

import json
import re
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import pytest
from support.fake_keys import GITHUB, HF, JWT, KEY, KEY_ID, MIXED, OPENAI, PEM, SLACK, TOKEN, WANDB
from support.fake_keys import made_up as made
from support.jobs import EXAMPLES

from cloudtrain.backends.sagemaker.target import SageMakerTarget
from cloudtrain.bundle.git_source import read_source
from cloudtrain.catalog.prices import bundled_prices
from cloudtrain.errors import SpecError
from cloudtrain.job.spec import JobSpec
from cloudtrain.planning.plan import CodeInfo
from cloudtrain.planning.planner import make_plan
from cloudtrain.secrets.scanner import scan_text
from cloudtrain.settings.settings import Settings
from cloudtrain_runtime.contract.redaction import redact
from cloudtrain_runtime.contract.token_formats import FORMATS

JOB = EXAMPLES / "script-ddp" / "job.yaml"
CODE = CodeInfo(digest="0" * 64, bytes=1, files=1)
TARGET = SageMakerTarget(Settings(region="us-west-2"), bundled_prices())
PASSWORD = made(24, MIXED)
BASIC = "dXNlcjo" + made(20, MIXED) + "7"
TOKENS = [
    ("private key", PEM, PEM.splitlines()[1]),
    ("AWS access key id", f"key = '{KEY_ID}'", KEY_ID),
    ("AWS secret access key", f'aws_secret_access_key = "{KEY}"', KEY),
    ("AWS secret access key", f'os.getenv("AWS_SECRET_ACCESS_KEY") or "{KEY}"', KEY),
    ("AWS session token", f"export AWS_SESSION_TOKEN={TOKEN}", TOKEN),
    ("password in a header", f"Authorization: Basic {BASIC}", BASIC),
    ("password in a header", f'{{"Authorization": f"Basic {BASIC}"}}', BASIC),
    ("token in a header", f"Authorization: Bearer {made(40, MIXED)}", made(40, MIXED)),
    ("signature in a URL", f"https://a.example/x?access_token={PASSWORD}", PASSWORD),
    ("shared access signature", f"https://a.example/c?sv=1&sig={made(44, MIXED)}", made(44, MIXED)),
    ("storage account key", f"AccountName=a;AccountKey={made(86, MIXED)}==", made(86, MIXED)),
    ("password in a URL", f"--index-url https://ada:{PASSWORD}@pypi.example/simple", PASSWORD),
    ("password in a URL", f"git+https://oauth2:{PASSWORD}@gitlab.example/x.git", PASSWORD),
    ("password in a URL", f"DSN = 'postgresql://ada:{PASSWORD}@db.example:5432/x'", PASSWORD),
    ("password in a URL", f"redis://:{PASSWORD}@cache.example:6379", PASSWORD),
    ("token in a URL", f"https://{made(36, MIXED)}@github.com/a/b.git", made(36, MIXED)),
    ("password of curl", f"curl --user ada:{PASSWORD} https://a.example", PASSWORD),
    ("password of a host", f"machine a.example login ada password {PASSWORD}", PASSWORD),
    ("Hugging Face token", HF, HF[3:]),
    ("GitHub token", GITHUB, GITHUB[4:]),
    ("GitLab token", f"glpat-{made(20, MIXED)}", made(20, MIXED)),
    ("OpenAI or Anthropic key", OPENAI, OPENAI[3:]),
    ("GitLab token", f"glrt-{made(20, MIXED)}", made(20, MIXED)),
    ("OpenAI or Anthropic key", f"sk-or-v1-{WANDB}", WANDB),
    ("Slack token", SLACK, SLACK[5:]),
    ("Slack token", f"xapp-1-A0{made(30, MIXED)}", made(30, MIXED)),
    ("Slack webhook", f"https://hooks.slack.com/services/T0/B0/{made(40, MIXED)}", made(40, MIXED)),
    ("NVIDIA key", f"nvapi-{made(64, MIXED)}", made(64, MIXED)),
    ("Groq key", f"gsk_{made(52, MIXED)}", made(52, MIXED)),
    ("Replicate token", f"r8_{made(37, MIXED)}", made(37, MIXED)),
    ("SendGrid key", f"SG.{made(22, MIXED)}.{made(43, MIXED)}", made(43, MIXED)),
    ("Google API key", f"AIza{made(35, MIXED)}", made(35, MIXED)),
    ("npm token", f"npm_{made(36, MIXED)}", made(36, MIXED)),
    ("PyPI token", f"pypi-AgE{made(60, MIXED)}", made(60, MIXED)),
    ("Stripe key", f"sk_live_{made(24, MIXED)}", made(24, MIXED)),
    ("JSON web token", JWT, JWT[3:]),
    ("Weights & Biases key", f"WANDB_API_KEY={WANDB}", WANDB),
    ("Weights & Biases key", f"wandb_v1_{made(70, MIXED)}", made(70, MIXED)),
    ("password or key by its name", f'password = "{PASSWORD}"', PASSWORD),
    ("password or key by its name", f"api_key: {PASSWORD}", PASSWORD),
]
"""Kind, a text with a token of it, and the part that nobody may see."""

each_token = pytest.mark.parametrize(
    ("kind", "text", "secret"), TOKENS, ids=[f"{kind}-{n}" for n, (kind, _, _) in enumerate(TOKENS)]
)


def test_every_format_has_an_example() -> None:
    for each in FORMATS:
        pattern = re.compile(f"{each.begin}{each.value}")
        examples = [text for kind, text, _ in TOKENS if kind == each.kind]
        assert any(map(pattern.search, examples)), each.kind
        assert all(
            any(needle in text.lower() for needle in each.needles.split())
            for text in examples
            if pattern.search(text)
        )


@each_token
def test_a_log_hides_it(kind: str, text: str, secret: str) -> None:
    assert secret not in redact(f"before {text} behind"), kind
    assert secret not in redact(f'{{"text": "{text}"}}')


@each_token
def test_a_job_that_contains_it_is_refused(kind: str, text: str, secret: str) -> None:
    for place in ("code.env.NOTE", "tags.note"):
        spec = JobSpec.from_yaml(JOB, [f"{place}={json.dumps(text)}"])
        with pytest.raises(SpecError) as refused:
            make_plan(spec, CODE, TARGET, now=datetime.now(UTC), suffix="1a2b3c")
        assert place in [problem.path for problem in refused.value.problems], kind
        assert secret not in str(refused.value)


@each_token
def test_a_file_that_contains_it_stops_the_submit(kind: str, text: str, secret: str) -> None:
    is_searched = any(each.kind == kind and each.in_files != "" for each in FORMATS)
    found = [name for _, name in scan_text(f"first\n{text}\n".encode())]
    assert found == [kind] * is_searched
    assert secret not in "".join(found)


@each_token
def test_a_diff_does_not_show_it(tmp_path: Path, kind: str, text: str, secret: str) -> None:
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
    assert secret not in source.diff
