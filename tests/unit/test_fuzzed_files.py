"""Damaged and hostile files: each reader of a file from outside has one kind of error, in bounded time and memory.

Logs and events have tests of their own (test_fuzzed_logs.py), as have requests to a served model.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import random
import tarfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.jobs import EXAMPLES
from support.sizes import tries

from cloudtrain import plan
from cloudtrain.aws.s3_lock import parse_holder
from cloudtrain.backends.container.state_file import read_state
from cloudtrain.backends.sagemaker.endpoint_billing import _recorded
from cloudtrain.backends.sagemaker.target import SageMakerTarget
from cloudtrain.backends.sandbox.fault_injection import FaultPlan
from cloudtrain.backends.sandbox.process import find_sandbox
from cloudtrain.bundle.digests import Digests
from cloudtrain.bundle.unpacking import UnpackError, unpack
from cloudtrain.catalog.prices import bundled_prices, read_prices
from cloudtrain.client.receipts import read_receipt
from cloudtrain.errors import CloudtrainError
from cloudtrain.features.recovery.service import StoredJob
from cloudtrain.features.setup.terraform_outputs import read_outputs
from cloudtrain.features.sweeps.loader import load_sweep
from cloudtrain.features.sweeps.stored_sweep import StoredSweep
from cloudtrain.job.spec import JobSpec
from cloudtrain.planning.plan import CodeInfo
from cloudtrain.planning.planner import make_plan
from cloudtrain.runs.attempt_chain import read_chain
from cloudtrain.runs.downloads import _unpack
from cloudtrain.runs.evaluations import parse_evaluation
from cloudtrain.runs.known_runs import recorded_homes
from cloudtrain.runs.run_files import PLAN, read_file
from cloudtrain.settings.settings import Settings, load_settings
from cloudtrain.settings.trust import has_agreed
from cloudtrain_runtime.checkpoint.trainer_format import parse_marker
from cloudtrain_runtime.contract.manifest import Manifest
from cloudtrain_runtime.contract.run_config import RunConfig
from cloudtrain_runtime.contract.serving_config import ServingConfig

RUN = "odd-261120-101500-1a2b3c"
NOW = 1_763_633_700.0
ROUNDS = tries(120)

STATE = {"state": "RUNNING", "created": NOW, "started": NOW, "ended": None, "reason": "", "pid": 1}
RECEIPT = {
    "version": 1, "digest": "0" * 64, "verdict": "proven", "date": "2026-11-20T10:15:00+00:00",
    "checks": {"starts": "proven"}, "seconds": 1.0, "command": "cloudtrain rehearse",
}  # fmt: skip
EVALUATION = {
    "run": RUN, "evaluated": RUN, "created": NOW,
    "splits": {"test": {"samples": 3, "metrics": {"accuracy": {"value": 0.5, "low": 0.1, "high": 0.9}}}},
}  # fmt: skip
MARKER = {"run": RUN, "step": 3, "files": [{"path": "a", "fingerprints": [[1, 2]]}]}
OUTPUTS = {"bucket": {"value": "my-bucket", "type": "string"}, "subnets": {"value": ["subnet-1"]}}
SERVING = {"version": 1, "run": RUN, "task": "a:B", "args": {}, "max_batch": 4}
SWEEP_RECORD = {
    "sweep": RUN, "created": "2026-11-20T10:15:00+00:00", "backend": "local", "base": "/x",
    "spec": {"metric": "loss"}, "job": {"name": "x"}, "identity": "0" * 64,
}  # fmt: skip
ENDPOINT = {
    "place": "x", "arn": "arn:aws:sagemaker:us-west-2:123456789012:endpoint/x", "name": "x", "run": RUN,
    "created": NOW, "deleted": NOW, "instance_type": "ml.m5.large", "instances": 1, "state": "InService",
}  # fmt: skip
SANDBOX = {
    "endpoint": "http://127.0.0.1:1",
    "role": "r",
    "bucket": "b",
    "environment": {},
    "process": 1,
}
DIGESTS = {"version": "x", "files": {"a": [[1, 2, 3, 4], ["0" * 64, 1, [], None]]}}
PRICES = {"date": "2026-11-20", "training": {"us-west-2": {"ml.m5.large": 0.1}}}
MANIFEST = {
    "version": 1,
    "step": 3,
    "run": RUN,
    "files": {"a": {"bytes": 1, "crc32": ["00000000"]}},
}
FAULTS = "capacity_after_seconds: 30\nthrottle: 0.1\n"
SETTINGS = 'bucket = "my-bucket"\nsubnets = ["subnet-1"]\n[profiles.a]\nregion = "us-west-2"\n'
JOB = (EXAMPLES / "script-ddp" / "job.yaml").read_text()
CHAIN = {
    "version": 1, "identity": "", "id": RUN, "backend": "sagemaker", "job": "odd", "runtime_seconds": 3600, "created": NOW,
    "limits": {"attempts": 5, "cost": "500 USD", "time": "14d", "on": ["capacity", "time_limit"]},
    "reservation_usd": 60.5, "usd_per_hour": 55.0, "state": None, "reason": "",
    "attempts": [{
        "run": RUN, "state": "RUNNING", "reservation_usd": 60.5, "runtime_seconds": 600, "settled_usd": 0.0,
        "overrun_usd": 0.0, "checkpoint": 20, "cause": "", "reason": "", "started": NOW, "ended": None,
    }],
}  # fmt: skip
JOB_OF_CHAIN = {"job": {"name": "odd"}, "base": "/x", "digest": "0" * 64}
SWEEP = (EXAMPLES / "sweep-digits" / "sweep.yaml").read_text()

PLAN_OF_JOB = make_plan(
    JobSpec.from_yaml(EXAMPLES / "digits" / "job.yaml"),
    CodeInfo(digest="0" * 64, bytes=1, files=1),
    SageMakerTarget(Settings(region="us-west-2"), bundled_prices()),
    now=datetime(2026, 11, 20, tzinfo=UTC),
    suffix="1a2b3c",
)

ODD: tuple[Any, ...] = (
    None, True, -1, 2**64, 10**400, 0.5, 1e308, float("nan"), "", "x", "\ud800", "\x00\x1b[2J", "x" * 5000, [], {},
    [None], {"": None}, [[[]]], {"run": {"run": []}}, "../../etc/passwd", "2026-11-20T10:15:00",
)  # fmt: skip


class Reader(NamedTuple):
    """A reader of one kind of file.

    Attributes:
        valid: Content that it accepts, or that has at least the right fields: a JSON value, or text.
        name: Name of the file.
        read: Reads the file. What it returns is not compared.
        errors: What it may raise, by its documentation.
    """

    valid: Any
    name: str
    read: Callable[[Path], Any]
    errors: tuple[type[Exception], ...] = ()


def _environ(file: Path) -> dict[str, str]:
    """Return an environment whose configuration folder is `<parent>/cloudtrain`, with this file in it."""
    return {"XDG_CONFIG_HOME": str(file.parent.parent)}


def _digest(file: Path) -> None:
    cache = Digests(Path("/somewhere"), file.parent)
    file.rename(cache._file)  # noqa: SLF001 (its name depends on the code folder)
    Digests(Path("/somewhere"), file.parent).of("a", __file__, Path(__file__).stat())
    cache._file.unlink()  # noqa: SLF001


def _evaluation(file: Path) -> None:
    parse_evaluation(file.read_bytes())


READERS = {
    "job.yaml": Reader(JOB, "job.yaml", JobSpec.from_yaml, (CloudtrainError,)),
    "sweep.yaml": Reader(SWEEP, "sweep.yaml", load_sweep, (CloudtrainError,)),
    "faults": Reader(FAULTS, "faults.yaml", FaultPlan.from_file, (CloudtrainError,)),
    "cloudtrain.toml": Reader(
        SETTINGS,
        "cloudtrain.toml",
        lambda file: load_settings({}, job_directory=file.parent),
        (CloudtrainError,),
    ),
    "profile": Reader(
        SETTINGS, "config.toml", lambda file: load_settings(_environ(file)), (CloudtrainError,)
    ),
    "outputs of Terraform": Reader(OUTPUTS, "outputs.json", read_outputs, (CloudtrainError,)),
    "prices": Reader(PRICES, "prices.json", read_prices, (CloudtrainError,)),
    "agreements": Reader(
        {"/x/cloudtrain.toml": {"role": "0" * 64}},
        "trusted.json",
        lambda file: has_agreed(_environ(file), load_settings({}, job_directory=file.parent)),
    ),
    "record of runs": Reader(
        {"run": f"local:{RUN}", "home": "/x"},
        "runs.jsonl",
        lambda file: recorded_homes(_environ(file)),
    ),
    "record of endpoints": Reader(
        ENDPOINT, "endpoints.jsonl", lambda file: list(_recorded("x", _environ(file)))
    ),
    "state.json": Reader(
        STATE, "state.json", lambda file: read_state(file.parent), (CloudtrainError,)
    ),
    "plan.json": Reader({"run": RUN}, "plan.json", lambda file: read_file(file, PLAN)),
    "receipt": Reader(RECEIPT, "rehearsal.json", read_receipt, (ValueError,)),
    "evaluation": Reader(EVALUATION, "evaluation.json", _evaluation),
    "sandbox.json": Reader(SANDBOX, "sandbox.json", lambda file: find_sandbox(file.parent)),
    "cache of digests": Reader(DIGESTS, "digests.json", _digest),
    "lock in S3": Reader({"run": RUN}, "lock", lambda file: parse_holder(file.read_bytes(), "run")),
    "chain.json": Reader(
        CHAIN, "chain.json", lambda file: read_chain(file.parent), (CloudtrainError,)
    ),
    "job.json": Reader(
        JOB_OF_CHAIN, "job.json", lambda file: StoredJob.read(file.parent), (CloudtrainError,)
    ),
    "sweep.json": Reader(
        SWEEP_RECORD, "sweep.json", lambda file: StoredSweep.read(file.parent), (CloudtrainError,)
    ),
    "manifest": Reader(
        MANIFEST, "manifest.json", lambda file: Manifest.from_json(file.read_bytes()), (ValueError,)
    ),
    "run.json": Reader(
        json.loads(PLAN_OF_JOB.config.to_json()),
        "run.json",
        lambda file: RunConfig.from_json(file.read_bytes()),
        (ValueError,),
    ),
    "serving.json": Reader(
        SERVING,
        "serving.json",
        lambda file: ServingConfig.from_json(file.read_bytes()),
        (ValueError,),
    ),
    "list of a trainer's checkpoint": Reader(
        MARKER, "cloudtrain.json", lambda file: parse_marker(file.read_bytes())
    ),
}
"""All readers of a file that others may have written, by what they read."""

NESTED = ("[" * 100_000, "[" * 900 + "]" * 900, '{"a":' * 100_000, "- " * 5_000)
"""Texts that are nested deeply; Python's parsers accept some of them."""
RAW = (b"", b"\xff\xfe\x00", b"\x00" * 100, b"{", b"null", b"[]", b"7", b'"x"', b"nan", b"9" * 5000)


def _changed(value: Any, chance: random.Random) -> Any:
    """Return a JSON value with one part of it replaced, removed or repeated."""
    if not isinstance(value, dict | list) or not value or chance.random() < 0.2:
        return chance.choice(ODD)
    if isinstance(value, list):
        place = chance.randrange(len(value))
        return [*value[:place], _changed(value[place], chance), *value[place + 1 :]]
    name = chance.choice(list(value))
    kept = {key: part for key, part in value.items() if key != name}
    if chance.random() < 0.2:
        return kept
    if chance.random() < 0.1:
        return {**kept, chance.choice(["", "x", "__class__", "\ud800"]): value[name]}
    return {**value, name: _changed(value[name], chance)}


def _damaged(data: bytes, chance: random.Random) -> bytes:
    """Return bytes with a part of them changed, cut off or repeated."""
    at, end = sorted(chance.randrange(len(data) + 1) for _ in range(2))
    return chance.choice(
        [
            data[:at],
            data[:at] + data[end:],
            data[:at] + chance.randbytes(chance.randrange(1, 9)) + data[at:],
            data[:at] + data[at:end] * 3 + data[end:],
            data[:at] + chance.choice([b"[", b"{", b'"', b"\n", b"\t", b"&a *a", b": ", b"\x00"]) + data[at:],
        ]
    )  # fmt: skip


def _contents(valid: Any, chance: random.Random) -> list[bytes]:
    text = valid if isinstance(valid, str) else json.dumps(valid)
    found = [*RAW, *(text.encode() for text in NESTED)]
    for _ in range(ROUNDS):
        if not isinstance(valid, str) and chance.random() < 0.7:
            found.append(json.dumps(_changed(valid, chance)).encode())
        else:
            found.append(_damaged(text.encode(), chance))
    return found


@pytest.mark.parametrize("kind", READERS)
def test_a_damaged_file_has_the_readers_own_error(kind: str, tmp_path: Path) -> None:
    reader = READERS[kind]
    folder = tmp_path / "cloudtrain"  # the name that a folder of the user's configuration has
    folder.mkdir()
    file = folder / reader.name
    chance = random.Random(kind)  # noqa: S311 (test data)
    valid = reader.valid if isinstance(reader.valid, str) else json.dumps(reader.valid)
    for content in (valid.encode(), *_contents(reader.valid, chance)):
        file.write_bytes(content)
        try:
            reader.read(file)
        except reader.errors:
            pass
        except Exception as error:
            raise AssertionError(f"{kind}: {content[:300]!r}") from error


def _archive(members: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as packed:
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            packed.addfile(entry, io.BytesIO(content))
    return out.getvalue()


@pytest.mark.parametrize("reader", [unpack, _unpack], ids=["unpack", "download"])
def test_a_damaged_archive_has_the_readers_own_error(
    reader: Callable[[Path, Path], object], tmp_path: Path
) -> None:
    valid = _archive({"train.py": b"print(1)\n" * 50, "a/b.py": b"", "c" * 200: b"x" * 3000})
    chance = random.Random(0)  # noqa: S311 (test data)
    plain = gzip.decompress(valid)
    contents = [valid, *RAW, *(_damaged(valid, chance) for _ in range(ROUNDS))]
    contents += [gzip.compress(_damaged(plain, chance), 1) for _ in range(ROUNDS)]
    for number, content in enumerate(contents):
        archive = tmp_path / f"{number}.tar.gz"
        archive.write_bytes(content)
        try:
            reader(archive, tmp_path / "unpacked" / str(number))
        except (CloudtrainError, UnpackError):
            pass
        except Exception as error:
            raise AssertionError(f"{content[:300]!r}") from error
    folders = {path.name for path in tmp_path.iterdir() if path.is_dir()}
    assert folders == {"unpacked", "home"}


SOURCES = (
    "x = " + "(" * 300 + ")" * 300,
    "x = " + "-" * 20_000 + "1",
    "x = a" + ".b" * 900,
    "x = a" + ".b" * 20_000,
    "x = a" + "[0]" * 900,
    "x = " + "f(" * 90 + ")" * 90,
    "x = " + "1 + " * 5_000 + "1",
    "".join("  " * depth + "if x:\n" for depth in range(95)) + "  " * 95 + "pass",
    "# coding: nothing\nx = 1",
    "# coding: utf-16\nx = 1",
    "x = '\x00'",
    "import " + "a." * 2_000 + "b",
    "from . import *\nfrom .. import x\nfrom ....a import b",
    "def f(" + ", ".join(f"a{n}" for n in range(5_000)) + "): pass",
    "class A(B, metaclass=C):\n" + "    x: int\n" * 5_000,
    "x = '" + "y" * 10**6 + "'",
    "x = " + "9" * 5000,
    "x = f'{" + "y" * 1000 + "}'",
    "match x:\n    case {**rest}: pass\n",
    "def loss(self): return all_gather(x" + ".y" * 900 + ")",
)


@pytest.mark.parametrize("place", ["script", "module"])
@pytest.mark.parametrize("source", SOURCES, ids=lambda text: repr(text[:20]))
def test_a_source_that_cannot_be_parsed_gives_no_finding(
    tmp_path: Path, source: str, place: str
) -> None:
    (tmp_path / "train.py").write_text(source if place == "script" else "import other\n")
    (tmp_path / "other.py").write_text(source)
    (tmp_path / "job.yaml").write_text(
        "name: x\ncode: {script: train.py}\ncluster: {instance_type: ml.m5.large}\n"
    )
    with contextlib.suppress(CloudtrainError):
        plan(tmp_path / "job.yaml", local=True)
