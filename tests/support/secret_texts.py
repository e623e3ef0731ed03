"""Texts with a made-up key, token or password: what is hidden in logs, and what of it files are searched for."""

from __future__ import annotations

import json
from typing import NamedTuple

from support.fake_keys import (
    BODY,
    GITHUB,
    HF,
    JWT,
    KEY,
    KEY_ID,
    MIXED,
    OPENAI,
    PEM,
    SESSION_KEY_ID,
    SIGNATURE,
    SLACK,
    TOKEN,
    WANDB,
    made_up,
)


class SecretText(NamedTuple):
    """A text with a secret.

    Attributes:
        kind: Its format; of several, the one that a file with this text is refused for.
        text: The text.
        secrets: Parts of it that a log must not show.
    """

    kind: str
    text: str
    secrets: tuple[str, ...]


def _text(kind: str, text: str, *secrets: str) -> SecretText:
    return SecretText(kind, text, secrets)


_AWS = "AWS secret access key"
_ID = "AWS access key id"
_SESSION = "AWS session token"
_URL = "password in a URL"
_NAMED = "password or key by its name"
_WANDB = "Weights & Biases key"
_NAME = "AWS_SECRET_ACCESS_KEY"
_WANDB_V1 = f"{made_up(27, MIXED)}_{made_up(49, MIXED, 1)}"
_LONG = made_up(60, MIXED)
_SHORT = made_up(20, MIXED)
_PRESIGNED = (
    'Could not connect to the endpoint URL: "https://b.s3.us-west-2.amazonaws.com/k?X-Amz-Algorithm=AWS4'
    f'&X-Amz-Credential={SESSION_KEY_ID}%2F20261121&X-Amz-Security-Token={TOKEN}&X-Amz-Signature={SIGNATURE}"'
)

FOUND_IN_FILES = (
    _text(_ID, f"Credential: {KEY_ID} was used", KEY_ID),
    _text(_ID, f"AWS_ACCESS_KEY_ID={SESSION_KEY_ID}", SESSION_KEY_ID),
    _text(_ID, f"{KEY_ID},{KEY}\n", KEY_ID, KEY),
    _text(_ID, _PRESIGNED, SESSION_KEY_ID, TOKEN, SIGNATURE),
    _text(
        _ID, f"https://b.s3.amazonaws.com/k?AWSAccessKeyId={KEY_ID}&Signature=aB%2Fc1%3D", KEY_ID
    ),
    _text(_ID, f"Authorization: AWS4 Credential={KEY_ID}/x, Signature={SIGNATURE}", SIGNATURE),
    _text(_AWS, f"aws_secret_access_key = {KEY}", KEY),
    _text(_AWS, json.dumps({"SecretAccessKey": KEY, "SessionToken": TOKEN}), KEY, TOKEN),
    _text(_AWS, json.dumps(json.dumps({_NAME: KEY})), KEY),
    _text(
        _AWS, f"<SecretAccessKey>{KEY}</SecretAccessKey><SessionToken>{TOKEN}</SessionToken>", KEY
    ),
    _text(_AWS, f'os.environ["{_NAME}"] = "{KEY}"', KEY),
    _text(_AWS, f"os.environ['{_NAME}']='{KEY}'", KEY),
    _text(_AWS, f'os.environ.setdefault("{_NAME}", "{KEY}")', KEY),
    _text(_AWS, f'key = os.environ.get("{_NAME}", default="{KEY}")', KEY),
    _text(_AWS, f'key = os.getenv("{_NAME}") or "{KEY}"', KEY),
    _text(_AWS, rf'   "os.environ[\"{_NAME}\"] = \"{KEY}\"\n",', KEY),
    _text(_AWS, f'{_NAME}: str = r"{KEY}"', KEY),
    _text(_AWS, f"ENV {_NAME} {KEY}", KEY),
    _text(_AWS, f"%env {_NAME}={KEY}", KEY),
    _text(_AWS, f"aws configure set {_NAME.lower()} {KEY}", KEY),
    _text(_AWS, f'environment {{ name = "{_NAME}", value = "{KEY}" }}', KEY),
    _text(_AWS, f"  - name: {_NAME}\n    value: {KEY}", KEY),
    _text(_SESSION, f"export AWS_SESSION_TOKEN={TOKEN}", TOKEN),
    _text(_SESSION, f"x-amz-security-token: {TOKEN}", TOKEN),
    _text(
        "password in a header", "Authorization: Basic dXNlcjpwYXNzd29yZA==", "dXNlcjpwYXNzd29yZA"
    ),
    _text("password in a header", f'{{"Authorization": f"Basic {_LONG}7"}}', _LONG),
    _text("token in a header", f"Authorization: Bearer {JWT}", JWT),
    _text("shared access signature", f"https://x.blob.core.windows.net/c?sv=1&sig={_LONG}", _LONG),
    _text("storage account key", f"DefaultEndpointsProtocol=https;AccountKey={KEY}{KEY}==;", KEY),
    _text(_URL, "pip: --index-url https://user:p4ss-w0rd@pypi.example.com/simple", "p4ss-w0rd"),
    _text(_URL, f"fatal: https://x-access-token:{GITHUB}@github.com/a/b.git", GITHUB),
    _text(_URL, "postgresql://ada:hunter2@db:5432/runs", "hunter2"),
    _text(_URL, "redis://:hunter2@cache", "hunter2"),
    _text("token in a URL", f"git clone https://{made_up(36, MIXED)}@github.com/a/b.git", _SHORT),
    _text(
        "password of curl", "curl --silent -u ada:hunter2hunter2 https://x.com", "hunter2hunter2"
    ),
    _text("password of a host", "machine example.com login ada password hunter2", "hunter2"),
    _text("password of a host", f"machine api.x.ai\n  login user\n  password {WANDB}", WANDB),
    _text("Hugging Face token", f"401 for https://huggingface.co with {HF}", HF),
    _text("GitHub token", f"remote: {GITHUB}", GITHUB),
    _text(
        "GitLab token", f"glpat-{made_up(9, MIXED)}-_{made_up(9, MIXED, 1)}", made_up(9, MIXED, 1)
    ),
    _text("OpenAI or Anthropic key", f"openai.api_key = '{OPENAI}'", OPENAI),
    _text("OpenAI or Anthropic key", f"incorrect API key provided: {OPENAI}", OPENAI),
    _text("GitLab token", f"glrt-{made_up(20, MIXED)}", _SHORT),
    _text("OpenAI or Anthropic key", f"sk-or-v1-{WANDB}", WANDB),
    _text("OpenAI or Anthropic key", f"sk-ant-api03-{_SHORT}-_{_SHORT}", _SHORT),
    _text("Slack token", f"slack {SLACK}", SLACK),
    _text("Slack token", "xoxb-" + "123456789012-abcdef", "123456789012"),
    _text("Slack token", f"xapp-1-A0{made_up(30, MIXED)}", made_up(30, MIXED)),
    _text("Slack webhook", f"https://hooks.slack.com/services/{_LONG}", _LONG),
    _text("NVIDIA key", f"nvapi-{made_up(64, MIXED)}", _LONG),
    _text("Groq key", f"gsk_{_LONG}", _LONG),
    _text("Replicate token", f"r8_{made_up(37, MIXED)}", made_up(37, MIXED)),
    _text("SendGrid key", f"SG.{made_up(22, MIXED)}.{made_up(43, MIXED)}", made_up(43, MIXED)),
    _text("Google API key", f"AIzaSy_-{made_up(31, MIXED)}", made_up(31, MIXED)),
    _text("npm token", f"npm_{made_up(36, MIXED)}", made_up(36, MIXED)),
    _text("PyPI token", f"pypi-AgE{made_up(50, MIXED)}-_x4", made_up(50, MIXED)),
    _text("Stripe key", f"sk_live_{made_up(24, MIXED)}", made_up(24, MIXED)),
    _text("JSON web token", f"token {JWT} expired", JWT),
    _text(_WANDB, f"WANDB_API_KEY={WANDB}", WANDB),
    _text(_WANDB, f'wandb.login(key="{WANDB}")', WANDB),
    _text(_WANDB, json.dumps({"wandb_api_key": WANDB}), WANDB),
    _text(_WANDB, f"os.environ['WANDB_API_KEY']='{WANDB}'", WANDB),
    _text(_WANDB, f'os.environ.setdefault("WANDB_API_KEY", "{WANDB}")', WANDB),
    _text(_WANDB, f"wandb_api_key: {WANDB}", WANDB),
    _text(_WANDB, f"ENV WANDB_API_KEY {WANDB}", WANDB),
    _text(_WANDB, f"wandb login {WANDB}", WANDB),
    _text(_WANDB, f"RUN wandb login --relogin --host=https://api.wandb.ai {WANDB}", WANDB),
    _text(_WANDB, f'subprocess.run(["wandb", "login", "{WANDB}"])', WANDB),
    _text(_WANDB, f'wandb.login(relogin=True, key="{WANDB}")', WANDB),
    _text(_WANDB, f'wandb.login(\n    relogin=True,\n    key="{WANDB}",\n)', WANDB),
    _text(_WANDB, f"key = 'wandb_v1_{_WANDB_V1}'", _WANDB_V1),
    _text("private key", PEM, *BODY.splitlines()),
    _text("private key", json.dumps({"key": PEM}), *BODY.splitlines()),
)

HIDDEN_IN_LOGS = (
    # Shorter than the tokens of real services; a file with it is most often a test or an example.
    _text(
        "token in a header", 'headers = {"Authorization": "Bearer abc123def456"}', "abc123def456"
    ),
    # Signatures expire, and code has names such as `token=` in each of its URLs.
    _text(
        "signature in a URL",
        "https://x.blob.core.windows.net/c?sv=2020&sig=aB3%2Fc1dE",
        "aB3%2Fc1dE",
    ),
    _text(
        "signature in a URL", f"https://callback.example.com/?access_token={_SHORT}&state=1", _SHORT
    ),
    # Code has values with such names that are no secrets: defaults, tests, names of variables.
    _text(_NAMED, "db_password=s3cr3t-passw0rd", "s3cr3t-passw0rd"),
    _text(_NAMED, '{"api_key": "0a1b2c3d4e5f"}', "0a1b2c3d4e5f"),
    _text(_NAMED, "access_key: 0a1b2c3d4e5f", "0a1b2c3d4e5f"),
    _text(_NAMED, "--private-key=0a1b2c3d4e5f", "0a1b2c3d4e5f"),
    _text(_NAMED, "HF_TOKEN=0a1b2c3d4e5f", "0a1b2c3d4e5f"),
    _text(_NAMED, "//npm.example.com/:_authToken=0a1b2c3d-4e5f", "0a1b2c3d-4e5f"),
    _text(_NAMED, f"Endpoint=sb://x.net/;SharedAccessKey={_SHORT}+c=", _SHORT),
    _text(_NAMED, "Server=db;Uid=ada;Pwd=hunter2hunter2;", "hunter2hunter2"),
)

SECRET_TEXTS = FOUND_IN_FILES + HIDDEN_IN_LOGS
