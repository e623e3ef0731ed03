"""Redaction of logs and errors: what is hidden, and what stays unchanged. Every key in this file is made up."""

from __future__ import annotations

import base64
import json
import os
import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_keys import (
    BODY,
    COMMIT,
    DIGEST,
    GITHUB,
    HF,
    KEY_ID,
    PEM,
    SIGNATURE,
)
from support.secret_texts import SECRET_TEXTS

from cloudtrain.errors import CloudError, Problem
from cloudtrain.runs.log_lines import LogLine
from cloudtrain.runs.run import Run, RunOperations
from cloudtrain.runs.status import State, Status
from cloudtrain.secrets.scanner import scan_text
from cloudtrain_runtime.contract import redaction
from cloudtrain_runtime.contract.redaction import REPLACEMENT, LineRedactor, RedactingStream, redact

UNTOUCHED = [
    "digits-261120-101500-1a2b3c",
    "sagemaker:digits-261120-101500-1a2b3c",
    f"commit {COMMIT} on main",
    f"sha256 {DIGEST}",
    f"s3://cloudtrain-bucket/cloudtrain/code/{DIGEST}/sourcedir.tar.gz",
    f"763104351884.dkr.ecr.us-west-2.amazonaws.com/pytorch@sha256:{DIGEST}",
    "arn:aws:iam::123456789012:role/training",
    "arn:aws:secretsmanager:us-west-2:123456789012:secret:team/wandb-AbCdEf",
    "WANDB_API_KEY = secret team/wandb, key api_key",
    "the secret team/wandb may not be read: the role needs secretsmanager:GetSecretValue",
    'CLOUDTRAIN {"event": "step", "step": 120, "loss": 2.31, "tokens_per_second": 123456.7, "time": 1795247001.0}',
    "[rank3]: step 120 loss 2.3125 lr 3e-4 tokens/s 12345678",
    "wandb: Run data is saved locally in /opt/ml/code/wandb/run-20261121_101500-abcdef12",
    f"wandb: code saved as {COMMIT}",
    "UserWarning: max_new_tokens=12345678 is longer than the model's context",
    "tokenizer.pad_token = tokenizer.eos_token",
    "    api_key = os.environ['OPENAI_API_KEY']",
    "    password=config.database.password,",
    "TypeError: login() missing 1 required positional argument: 'password'",
    "password: required",
    "the bearer of this message is rank 3",
    "http://127.0.0.1:5000/moto-api/reset",
    "tcp://algo-1:7777",
    "git@github.com:user/repository.git",
    "mail ada@example.com, see https://example.com/a:b/c@d",
    'Could not connect to the endpoint URL: "https://sts.us-west-2.amazonaws.com/"',
    "https://b.s3.amazonaws.com/?list-type=2&prefix=cloudtrain%2F&continuation-token=1abc",
    "from sk-learn import task-123456789012345678901234",
    "risk-adjusted loss, hf_transfer enabled, api_org_settings",
    "secret_key_length: 40",
    "NCCL version 2.27.5+cuda12.9",
    "ASIAPACIFICREGIONSONLY",
    'File "/opt/ml/code/train.py", line 12, in forward',
    "-----BEGIN CERTIFICATE-----",
    "Signature mismatch in forward(self, batch)",
    "AWS_DEFAULT_REGION=us-west-2 AWS_PROFILE=research",
]


@pytest.mark.parametrize("text", UNTOUCHED)
def test_other_text_is_unchanged(text: str) -> None:
    assert redact(text) == text
    assert scan_text(text.encode()) == []


@pytest.mark.parametrize("text", [each.text for each in SECRET_TEXTS])
def test_json_stays_json(text: str) -> None:
    redacted = json.loads(
        redact(json.dumps({"before": 1, "text": text, "after": ["x", {"y": text}]}))
    )
    assert redacted["before"] == 1
    assert redacted["after"][0] == "x"
    assert set(redacted) == {"before", "text", "after"}


def test_every_rule_is_found_by_its_keywords() -> None:
    """A rule is applied only to a text with one of its keywords. Without the keyword it would hide nothing."""
    for _, text, _ in SECRET_TEXTS:
        bare = text
        for _, pattern in redaction._RULES:  # noqa: SLF001
            bare = re.sub(pattern, redaction._hide, bare)  # noqa: SLF001
        assert bare == redact(text)


def test_errors_hide_secrets_in_messages_of_clients() -> None:
    error = CloudError(f"PutObject: https://x/?X-Amz-Signature={SIGNATURE}", f"with {KEY_ID}")
    assert SIGNATURE not in f"{error} {error.message} {error.args}"
    assert KEY_ID not in error.hint
    assert GITHUB not in str(Problem("job.yaml", 1, 1, "code.env.X", f'got "{GITHUB}"'))


def test_log_and_reason_of_a_run_contain_no_secrets() -> None:
    class TwoLines(RunOperations):
        """A backend with two log lines."""

        name = "two-lines"

        def logs(self, run: str, **_: object) -> object:  # type: ignore[override]
            return iter([LogLine("algo-1", f"[{run}] {GITHUB}"), LogLine("algo-1", "step 3")])

    lines = [line.text for line in Run("r", TwoLines()).logs()]
    assert lines == [f"[r] ghp_{REPLACEMENT}", "step 3"]
    assert HF not in Status("r", "local", State.FAILED, reason=f"bad {HF}").reason


@pytest.fixture
def _no_registered_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start without registered values, and remove the test's values after it."""
    monkeypatch.setattr(redaction, "_kept", {})
    monkeypatch.setattr(redaction, "_by_value", [])


@pytest.mark.usefixtures("_no_registered_values")
def test_a_private_key_in_the_lines_of_a_log_is_hidden() -> None:
    lines = ["loading", *(f"[rank0]: {line}" for line in PEM.splitlines()), "step 3", "abcd"]
    shown = list(map(LineRedactor().redact, lines))
    assert not [line for line in shown if any(part in line for part in BODY.splitlines())]
    assert (shown[0], shown[2], shown[-3:]) == (
        "loading",
        "[rank0]: ***",
        [f"[rank0]: {PEM.splitlines()[-1]}", "step 3", "abcd"],
    )


def test_a_private_key_in_json_within_json_is_hidden() -> None:
    for text in (json.dumps(json.dumps({"key": PEM})), json.dumps(json.dumps(json.dumps([PEM])))):
        assert not [part for part in BODY.splitlines() if part in redact(text)]


def test_registered_values_are_hidden_in_json_and_uris_too() -> None:
    value = 'pa"ss wörd/x'
    redaction.register_values([value, "short"])
    for text in (
        f"it is {value}!",
        json.dumps({"x": value}),
        json.dumps(json.dumps({"x": value})),
        "https://x/?k=pa%22ss%20w%C3%B6rd%2Fx",
        "https://x/?k=pa%22ss%20w%C3%B6rd/x",
        "k=pa%22ss+w%C3%B6rd%2Fx",
        "<td>pa&quot;ss wörd/x</td>",
    ):
        assert REPLACEMENT in redact(text)
        assert "ss" not in redact(text).replace("https", "")
    for user in ("", "a", "ab", "abc"):
        basic = base64.b64encode(f"{user}:{value}".encode()).decode()
        assert REPLACEMENT in redact(f"Basic {basic}")
        assert basic[6:-4] not in redact(f"Basic {basic}")
    assert redact("a short text") == "a short text"


@pytest.mark.usefixtures("_no_registered_values")
def test_each_line_of_a_registered_text_is_hidden() -> None:
    redaction.register_values([PEM])
    assert BODY.splitlines()[1] not in redact(f"[rank0]: {BODY.splitlines()[1]}")


@pytest.mark.usefixtures("_no_registered_values")
def test_members_of_a_registered_object_are_hidden_by_name() -> None:
    redaction.register_values(
        [json.dumps({"password": "correct-horse", "username": "ada-lovelace", "port": 5432})]
    )
    assert redact("ada-lovelace:correct-horse") == f"ada-lovelace:{REPLACEMENT}"
    redaction.register_values(["it's\ttabbed"])
    assert "tabbed" not in redact(repr({"x": "it's\ttabbed"}))


@given(
    st.lists(st.text(alphabet='abc\n"', min_size=6, max_size=12), min_size=1, max_size=3),
    st.lists(st.one_of(st.integers(0, 2), st.text(alphabet="abc\n xyz", max_size=8)), max_size=8),
    st.randoms(use_true_random=False),
)
def test_a_stream_hides_values_wherever_it_is_cut(
    values: list[str], parts: list[int | str], dice: random.Random
) -> None:
    """The output equals the redacted text, whatever the pieces."""
    text = "".join(
        part if isinstance(part, str) else f"<{values[part % len(values)]}>" for part in parts
    ).encode()
    stream, output, at = RedactingStream(values), b"", 0
    while at < len(text):
        size = dice.randint(1, 7)
        output += stream.feed(text[at : at + size])
        at += size
    output += stream.flush()
    assert not [value for value in values if f"<{value}>".encode() in output]
    if not any(
        form.encode() in text for value in values for form in redaction.encoded_forms(value)
    ):
        assert output == text


def test_stream_holds_back_only_the_start_of_a_secret() -> None:
    stream = RedactingStream(["secret-value"])
    assert stream.feed(b"step 1\nsec") == b"step 1\n"
    assert stream.feed(b"ond\n") == b"second\n"
    assert stream.feed(b"secret-") == b""
    assert stream.feed(b"value\n") == b"***\n"
    assert RedactingStream([]).feed(os.urandom(20)) != b""
