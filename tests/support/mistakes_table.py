"""Table of mistakes and the tools that report them: docs/reference/mistakes.md.

`PYTHONPATH=tests python -m support.mistakes_table --write` runs every tool on every mistake and writes the page. A test
runs them again and compares.
"""

from __future__ import annotations

import contextlib
import copy
import http.client
import importlib.metadata
import io
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from support.estimator import (
    BUCKET,
    CREATE,
    REGION,
    boto_session,
    sdk_session,
)
from support.jobs import serve_moto
from support.mistakes import (
    ESTIMATOR,
    FILES,
    FIT,
    JOB,
    MISTAKES,
    REMOVED,
    REQUEST,
    ROLE,
    Mistake,
)

TABLE = Path(__file__).parents[2] / "docs" / "reference" / "mistakes.md"

CAUGHT = "yes"
MISSED = "no"
NOT_APPLICABLE = "–"  # noqa: RUF001 (a dash for an empty cell)

_HEAD = """\
# Forty mistakes, and which tools report them

Each row is a valid job with one mistake, and the result of each tool. This command writes the table, and a test checks
it: `PYTHONPATH=tests python -m support.mistakes_table --write`

A tool reports a mistake under these conditions:

- **cloudtrain**: `cloudtrain plan job.yaml --json` exits with 2, and reports a hint and the place of the mistake: line
  and column in job.yaml, or the file in the code folder.
- **boto3**: `create_training_job` raises an exception before it sends the request.
- **estimator**: `sagemaker.pytorch.PyTorch(...)` or its `fit` raises an exception before it sends the request.
- **moto**: the local server responds with a client error (status 4xx).

A dash means that the mistake cannot be made with that tool. No request reaches AWS. With these mistakes, AWS would
reject some of the requests after the upload. Other jobs would fail in the container, minutes after the start and at
your cost. The rest would run.
"""


@dataclass(frozen=True)
class Results:
    """Results of one mistake by tool, each `CAUGHT`, `MISSED` or `NOT_APPLICABLE`.

    Attributes:
        place: Place that cloudtrain reports: `line:column`, or a file of the code folder.
        output: Output of cloudtrain, for the message of a failing test.
    """

    cloudtrain: str
    boto3: str
    estimator: str
    moto: str
    place: str = ""
    output: str = ""


@dataclass(frozen=True)
class Planted:
    """A job file with a mistake.

    Attributes:
        text: Content of the file.
        begin: First line and column of the mistake, both from 1.
        end: Last line and column of the mistake, inclusive.
    """

    text: str
    begin: tuple[int, int]
    end: tuple[int, int]

    def contains(self, line: int | None, column: int | None) -> bool:
        """Return whether a reported place is inside of the mistake."""
        return line is not None and column is not None and self.begin <= (line, column) <= self.end


def plant(mistake: Mistake) -> Planted | None:
    """Return the job file with a mistake in it, or None if the mistake is in the code folder only."""
    if mistake.job is None:
        return None
    old, new = mistake.job
    assert JOB.count(old) == 1, f"{old!r} occurs {JOB.count(old)} times in the valid job"
    text = JOB.replace(old, new)
    begin = _place(text, text.index("«"))
    text = text.replace("«", "")
    end = _place(text, text.index("»") - 1)
    return Planted(text.replace("»", ""), begin, end)


def _place(text: str, offset: int) -> tuple[int, int]:
    return text.count("\n", 0, offset) + 1, offset - text.rfind("\n", 0, offset)


def write_folder(mistake: Mistake, folder: Path) -> Planted | None:
    """Write the job file and its code folder, with the mistake."""
    planted = plant(mistake)
    (folder / "job.yaml").write_text(JOB if planted is None else planted.text)
    for name, content in {**FILES, **mistake.files}.items():
        if isinstance(content, Path):
            (folder / content).write_text("1 2 3")
            (folder / name).symlink_to(content)
        elif content is not REMOVED:
            (folder / name).write_text(content)
    return planted


def change(document: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a document with changed values at dotted paths. The value `REMOVED` removes a key."""
    changed: dict[str, Any] = copy.deepcopy(dict(document))
    for path, value in changes.items():
        *parents, name = path.split(".")
        target = changed
        for parent in parents:
            target = target[parent]
        if value is REMOVED:
            del target[name]
        else:
            target[name] = value
    return changed


class _SentError(Exception):
    """Raised in place of sending a request that has passed all checks of its client."""


def _raise_sent(**_event: Any) -> None:
    raise _SentError


class Tools:
    """Runs cloudtrain, boto3, the estimator and moto on jobs. moto serves at AWS_ENDPOINT_URL."""

    def __init__(self, session: Any, client: Any, sdk: Any) -> None:
        self._client = client
        self._sdk = sdk
        self._server = urlsplit(os.environ["AWS_ENDPOINT_URL"])
        self._requests = 0
        session.client("s3").create_bucket(
            Bucket=BUCKET, CreateBucketConfiguration={"LocationConstraint": REGION}
        )
        client.meta.events.register(f"before-call.{CREATE}", _raise_sent)

    def check(self, mistake: Mistake, folder: Path) -> Results:
        """Write a job with a mistake into an empty folder, and run every tool on it."""
        caught, place, output = self._cloudtrain(
            write_folder(mistake, folder), mistake.file, folder
        )
        request = None if mistake.request is None else change(REQUEST, mistake.request)
        return Results(
            cloudtrain=_word(caught),
            boto3=_word(None if request is None else self._boto3(request)),
            estimator=_word(
                None if mistake.estimator is None else self._estimator(mistake, folder)
            ),
            moto=_word(None if request is None else self._moto(request)),
            place=place,
            output=output,
        )

    def check_all(self, mistakes: Sequence[Mistake], base: Path) -> list[Results]:
        """Check each mistake in a new folder below `base`."""
        results = []
        for index, mistake in enumerate(mistakes):
            folder = base / str(index)
            folder.mkdir()
            results.append(self.check(mistake, folder))
        return results

    def _cloudtrain(
        self, planted: Planted | None, file: str, folder: Path
    ) -> tuple[bool, str, str]:
        """Return whether the plan fails with a hint at the place of the mistake, that place, and the output."""
        from cloudtrain.cli import run

        settings = ["--role", ROLE, "--bucket", BUCKET, "--region", REGION]
        with (
            contextlib.redirect_stdout(io.StringIO()) as out,
            contextlib.redirect_stderr(io.StringIO()),
        ):
            code = run(["plan", str(folder / "job.yaml"), *settings, "--json"])
        output = out.getvalue()
        report = json.loads(output)
        if code != 2:
            return False, "", f"exit code {code}"
        if planted is None:
            text = json.dumps(report)
            hints = [
                report.get("error", {}).get("hint"),
                *(p["hint"] for p in report.get("problems", [])),
            ]
            return file in text and any(hints), file, output
        for problem in report.get("problems", []):
            if planted.contains(problem["line"], problem["column"]) and problem["hint"]:
                return True, f"{problem['line']}:{problem['column']}", output
        return False, "", f"planted from {planted.begin} to {planted.end}: {output}"

    def _boto3(self, request: dict[str, Any]) -> bool:
        from botocore.exceptions import ParamValidationError

        try:
            self._client.create_training_job(**request)
        except _SentError:
            return False
        except ParamValidationError:
            return True
        raise AssertionError("the client neither rejected nor sent the request")

    def _estimator(self, mistake: Mistake, folder: Path) -> bool:
        from sagemaker.pytorch import PyTorch

        assert mistake.estimator is not None
        try:
            arguments = change(ESTIMATOR, mistake.estimator)
            estimator = PyTorch(**arguments, source_dir=str(folder), sagemaker_session=self._sdk)
            estimator.fit(**change(FIT, mistake.fit), wait=False)
        except _SentError:
            return False
        except Exception:  # noqa: BLE001 (the SDK raises many types)
            return True
        raise AssertionError("the client neither rejected nor sent the request")

    def _moto(self, request: dict[str, Any]) -> bool:
        """Send the request without the checks of a client; return whether the server rejects it."""
        self._requests += 1
        if request["TrainingJobName"] == REQUEST["TrainingJobName"]:
            request = {
                **request,
                "TrainingJobName": f"{request['TrainingJobName']}-{self._requests}",
            }
        scope = f"testing/20261120/{REGION}/sagemaker/aws4_request"
        headers = {
            "Content-Type": "application/x-amz-json-1.1",
            "X-Amz-Target": "SageMaker.CreateTrainingJob",
            "Authorization": f"AWS4-HMAC-SHA256 Credential={scope}, SignedHeaders=host, Signature=0",
        }
        connection = http.client.HTTPConnection(
            self._server.hostname or "", self._server.port, timeout=60
        )
        connection.request("POST", "/", json.dumps(request), headers)
        status = connection.getresponse().status
        connection.close()
        return 400 <= status < 500


def _word(caught: bool | None) -> str:
    if caught is None:
        return NOT_APPLICABLE
    return CAUGHT if caught else MISSED


@contextlib.contextmanager
def open_tools() -> Iterator[Tools]:
    """Yield the tools. The server at AWS_ENDPOINT_URL must be empty."""
    session = boto_session()
    client = session.client("sagemaker")
    with sdk_session(session, client) as sdk:
        yield Tools(session, client, sdk)


def rows(results: list[Results]) -> list[str]:
    """Return the lines of the table: head, one line per mistake, totals."""
    lines = [
        "| | mistake | planted | cloudtrain | boto3 | estimator | moto |",
        "|---|---|---|---|---|---|---|",
    ]
    for number, (mistake, found) in enumerate(zip(MISTAKES, results, strict=True), start=1):
        ours = f"{found.cloudtrain}, {found.place}" if found.place else found.cloudtrain
        cells = (
            str(number),
            mistake.title,
            _shown(mistake),
            ours,
            found.boto3,
            found.estimator,
            found.moto,
        )
        lines.append(f"| {' | '.join(cells)} |")
    columns = ("cloudtrain", "boto3", "estimator", "moto")
    totals = [
        f"{sum(getattr(found, column) == CAUGHT for found in results)} of {len(results)}"
        for column in columns
    ]
    return [*lines, f"| | **reported** | | {' | '.join(totals)} |"]


def _shown(mistake: Mistake) -> str:
    """Return the mistake's text, shortened to fit a cell."""
    if mistake.job is None:
        return f"`{mistake.file}`"
    new = mistake.job[1]
    text = new[new.index("«") + 1 : new.index("»")].replace("\t", "→ ")
    text = "; ".join(line.strip() for line in text.splitlines())
    return f"`{text}`" if len(text) <= 80 else f"`{text[:40]}...`"


def page(results: list[Results]) -> str:
    """Return the content of docs/reference/mistakes.md."""
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}" for name in ("botocore", "sagemaker", "moto")
    )
    return "\n".join([_HEAD, *rows(results), "", f"Versions: {versions}.", ""])


def table_rows(text: str) -> list[str]:
    """Return the lines of a page that belong to the table, without the versions."""
    return [line for line in text.splitlines() if line.startswith("|")]


def main() -> None:
    """Check all mistakes. Write the page with `--write`, else print it."""
    with tempfile.TemporaryDirectory() as base, serve_moto(Path(base, "moto.log")) as endpoint:
        os.environ["AWS_ENDPOINT_URL"] = endpoint
        with open_tools() as tools:
            results = tools.check_all(MISTAKES, Path(base))
    if "--write" in sys.argv:
        TABLE.write_text(page(results))
    else:
        print(page(results))
    for mistake, found in zip(MISTAKES, results, strict=True):
        if found.cloudtrain != CAUGHT:
            print(f"not caught by cloudtrain: {mistake.title}: {found.output}", file=sys.stderr)


if __name__ == "__main__":
    main()
