"""Plant each mistake for real, ask who notices, and write the answers down.

`PYTHONPATH=tests python -m support.mistakes_table --write` writes docs/reference/mistakes.md; a test asks again and
compares.
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
    GONE,
    JOB,
    MISTAKES,
    REQUEST,
    ROLE,
    Mistake,
)

TABLE = Path(__file__).parents[2] / "docs" / "reference" / "mistakes.md"

CAUGHT = "yes"
MISSED = "no"
CANNOT_SAY = "–"  # noqa: RUF001 (a dash for an empty cell)

_HEAD = """\
# Forty mistakes, and who notices

Each mistake is planted in a good job and each check is really run. The table is written by
`PYTHONPATH=tests python -m support.mistakes_table --write`, and a test compares it with what happens.

- **cloudtrain**: `cloudtrain plan job.yaml --json` exits with 2. The place is the line and column that it reports,
  always inside of what was planted and always with a hint; a mistake of the code folder is named by its file.
- **boto3**: `create_training_job` raises before anything is sent.
- **estimator**: `sagemaker.pytorch.PyTorch(...)` or its `fit` raises before the request leaves.
- **moto**: the local server answers the document with an error of the caller (a crash of the server is no answer).

A dash says that the mistake cannot be written there. None of these calls reaches AWS, which would refuse some of the
mistakes after the upload, let others fail in the container after minutes of paid start, and let the rest run.
"""


@dataclass(frozen=True)
class Answers:
    """Who notices a mistake: `CAUGHT`, `MISSED` or `CANNOT_SAY` each.

    Attributes:
        place: What cloudtrain points at: `line:column`, or a file of the code folder.
        said: What cloudtrain printed, for a failing test's message.
    """

    cloudtrain: str
    boto3: str
    estimator: str
    moto: str
    place: str = ""
    said: str = ""


# ---------------------------------------------------------------- planting


@dataclass(frozen=True)
class Planted:
    """A job file with a mistake, and where in it the mistake stands: (line, column), both from 1, the end included."""

    text: str
    begin: tuple[int, int]
    end: tuple[int, int]

    def holds(self, line: int | None, column: int | None) -> bool:
        """Return whether a place lies inside of what was planted."""
        return line is not None and column is not None and self.begin <= (line, column) <= self.end


def plant(mistake: Mistake) -> Planted | None:
    """Return the job file with a mistake in it, or None when the mistake is one of the code folder."""
    if mistake.job is None:
        return None
    old, new = mistake.job
    assert JOB.count(old) == 1, f"{old!r} stands {JOB.count(old)} times in the good job"
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
        elif content is not GONE:
            (folder / name).write_text(content)
    return planted


def change(document: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a document in which values at dotted paths are others, or gone."""
    changed: dict[str, Any] = copy.deepcopy(dict(document))
    for path, value in changes.items():
        *parents, name = path.split(".")
        target = changed
        for parent in parents:
            target = target[parent]
        if value is GONE:
            del target[name]
        else:
            target[name] = value
    return changed


# ---------------------------------------------------------------- asking


class _LeftError(Exception):
    """The request has passed every check of its client and was about to leave."""


def _leave(**_event: Any) -> None:
    raise _LeftError


class Judges:
    """Asks cloudtrain, boto3, the estimator and moto about one job at a time. moto serves at AWS_ENDPOINT_URL."""

    def __init__(self, session: Any, client: Any, sdk: Any) -> None:
        self._client = client
        self._sdk = sdk
        self._server = urlsplit(os.environ["AWS_ENDPOINT_URL"])
        self._asked = 0
        session.client("s3").create_bucket(Bucket=BUCKET, CreateBucketConfiguration={"LocationConstraint": REGION})
        client.meta.events.register(f"before-call.{CREATE}", _leave)

    def ask(self, mistake: Mistake, folder: Path) -> Answers:
        """Plant a mistake in an empty folder and return who notices it."""
        caught, place, said = self._cloudtrain(write_folder(mistake, folder), mistake.names, folder)
        request = None if mistake.request is None else change(REQUEST, mistake.request)
        return Answers(
            cloudtrain=_word(caught),
            boto3=_word(None if request is None else self._boto3(request)),
            estimator=_word(None if mistake.estimator is None else self._estimator(mistake, folder)),
            moto=_word(None if request is None else self._moto(request)),
            place=place,
            said=said,
        )

    def ask_all(self, mistakes: Sequence[Mistake], base: Path) -> list[Answers]:
        """Plant each mistake in a folder of its own below an empty one."""
        answers = []
        for index, mistake in enumerate(mistakes):
            folder = base / str(index)
            folder.mkdir()
            answers.append(self.ask(mistake, folder))
        return answers

    def _cloudtrain(self, planted: Planted | None, names: str, folder: Path) -> tuple[bool, str, str]:
        """Return whether the plan is refused at the planted place with a hint, the place, and what was printed."""
        from cloudtrain.cli import run

        settings = ["--role", ROLE, "--bucket", BUCKET, "--region", REGION]
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()):
            code = run(["plan", str(folder / "job.yaml"), *settings, "--json"])
        said = out.getvalue()
        answer = json.loads(said)
        if code != 2:
            return False, "", f"exit code {code}"
        if planted is None:
            text = json.dumps(answer)
            hints = [answer.get("error", {}).get("hint"), *(p["hint"] for p in answer.get("problems", []))]
            return names in text and any(hints), names, said
        for problem in answer.get("problems", []):
            if planted.holds(problem["line"], problem["column"]) and problem["hint"]:
                return True, f"{problem['line']}:{problem['column']}", said
        return False, "", f"planted from {planted.begin} to {planted.end}: {said}"

    def _boto3(self, request: dict[str, Any]) -> bool:
        from botocore.exceptions import ParamValidationError

        try:
            self._client.create_training_job(**request)
        except _LeftError:
            return False
        except ParamValidationError:
            return True
        raise AssertionError("the request was neither refused nor seen to leave")

    def _estimator(self, mistake: Mistake, folder: Path) -> bool:
        from sagemaker.pytorch import PyTorch

        assert mistake.estimator is not None
        try:
            arguments = change(ESTIMATOR, mistake.estimator)
            estimator = PyTorch(**arguments, source_dir=str(folder), sagemaker_session=self._sdk)
            estimator.fit(**change(FIT, mistake.fit), wait=False)
        except _LeftError:
            return False
        except Exception:  # noqa: BLE001 (whatever it raises: it has noticed)
            return True
        raise AssertionError("the request was neither refused nor seen to leave")

    def _moto(self, request: dict[str, Any]) -> bool:
        """Ask the server itself, past every check of a client."""
        self._asked += 1
        if request["TrainingJobName"] == REQUEST["TrainingJobName"]:
            request = {**request, "TrainingJobName": f"{request['TrainingJobName']}-{self._asked}"}
        scope = f"testing/20261120/{REGION}/sagemaker/aws4_request"
        headers = {
            "Content-Type": "application/x-amz-json-1.1",
            "X-Amz-Target": "SageMaker.CreateTrainingJob",
            "Authorization": f"AWS4-HMAC-SHA256 Credential={scope}, SignedHeaders=host, Signature=0",
        }
        connection = http.client.HTTPConnection(self._server.hostname or "", self._server.port, timeout=60)
        connection.request("POST", "/", json.dumps(request), headers)
        status = connection.getresponse().status
        connection.close()
        return 400 <= status < 500


def _word(caught: bool | None) -> str:
    if caught is None:
        return CANNOT_SAY
    return CAUGHT if caught else MISSED


@contextlib.contextmanager
def judges() -> Iterator[Judges]:
    """Yield the judges. The server at AWS_ENDPOINT_URL must be empty."""
    session = boto_session()
    client = session.client("sagemaker")
    with sdk_session(session, client) as sdk:
        yield Judges(session, client, sdk)


# ---------------------------------------------------------------- the table


def rows(answers: list[Answers]) -> list[str]:
    """Return the table's lines: head, one line per mistake, totals."""
    lines = ["| | mistake | planted | cloudtrain | boto3 | estimator | moto |", "|---|---|---|---|---|---|---|"]
    for number, (mistake, found) in enumerate(zip(MISTAKES, answers, strict=True), start=1):
        ours = f"{found.cloudtrain}, {found.place}" if found.place else found.cloudtrain
        cells = (str(number), mistake.title, _shown(mistake), ours, found.boto3, found.estimator, found.moto)
        lines.append(f"| {' | '.join(cells)} |")
    columns = ("cloudtrain", "boto3", "estimator", "moto")
    totals = [f"{sum(getattr(found, column) == CAUGHT for found in answers)} of {len(answers)}" for column in columns]
    return [*lines, f"| | **noticed** | | {' | '.join(totals)} |"]


def _shown(mistake: Mistake) -> str:
    """Return the planted text as it fits a cell."""
    if mistake.job is None:
        return f"`{mistake.names}`"
    new = mistake.job[1]
    text = new[new.index("«") + 1 : new.index("»")].replace("\t", "→ ")
    text = "; ".join(line.strip() for line in text.splitlines())
    return f"`{text}`" if len(text) <= 80 else f"`{text[:40]}...`"


def page(answers: list[Answers]) -> str:
    """Return the whole of docs/reference/mistakes.md."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("botocore", "sagemaker", "moto"))
    return "\n".join([_HEAD, *rows(answers), "", f"Asked with {versions}.", ""])


def table_rows(text: str) -> list[str]:
    """Return the table's lines of a page: what must hold whatever the versions are."""
    return [line for line in text.splitlines() if line.startswith("|")]


def main() -> None:
    """Ask everybody, and write the page with `--write`, else print it."""
    with tempfile.TemporaryDirectory() as base, serve_moto(Path(base, "moto.log")) as endpoint:
        os.environ["AWS_ENDPOINT_URL"] = endpoint
        with judges() as asked:
            answers = asked.ask_all(MISTAKES, Path(base))
    if "--write" in sys.argv:
        TABLE.write_text(page(answers))
    else:
        print(page(answers))
    for mistake, found in zip(MISTAKES, answers, strict=True):
        if found.cloudtrain != CAUGHT:
            print(f"not caught by cloudtrain: {mistake.title}: {found.said}", file=sys.stderr)


if __name__ == "__main__":
    main()
