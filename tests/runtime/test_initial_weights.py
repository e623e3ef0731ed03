"""`train.init_from`: a new run starts with other weights; a resumed one has its own."""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.loops import Grown, job, run
from support.parallel_training import Model, Outcome, Small, losses

from cloudtrain_runtime.checkpoint.initial_weights import load_initial_weights
from cloudtrain_runtime.contract import CheckpointConfig, ParallelConfig
from cloudtrain_runtime.errors import CheckpointError
from cloudtrain_runtime.process.run_context import Context
from cloudtrain_runtime.s3.objects import S3Objects

pytestmark = pytest.mark.processes

STILL = {"steps": 1, "learning_rate": 0.0}
"""A run whose exported weights are those that it started with."""
Weights = Mapping[str, torch.Tensor]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """A finished run of one rank: the folder of its checkpoints, and its outcome."""
    folder = tmp_path_factory.mktemp("source")
    saving = CheckpointConfig((folder / "checkpoints").as_uri(), None, 2, 9, "never")
    return folder, run(job(1, steps=4), 1, folder, Small, checkpoint=saving, dtype=torch.float32)


def started(uri: str, folder: Path, ranks: int = 1, **changes: object) -> Outcome:
    return run(
        job(ranks, init_from=uri, **{**STILL, **changes}), ranks, folder, Small, dtype=torch.float32
    )


def assert_equal(found: Weights | None, expected: Weights | None) -> None:
    assert found is not None
    assert expected is not None
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        (1, {}),
        (2, {}),
        (2, {"parallel": ParallelConfig(data="fsdp")}),
        (2, {"parallel": ParallelConfig(tensor=2)}),
        (2, {"parallel": ParallelConfig(pipeline=2), "accumulate": 2}),
    ],
    ids=["one", "ddp", "fsdp", "tensor", "pipeline"],
)
def test_a_run_starts_with_the_newest_checkpoint(
    ranks: int, changes: dict[str, object], source: tuple[Path, Outcome], tmp_path: Path
) -> None:
    found = started((source[0] / "checkpoints").as_uri(), tmp_path, ranks, **changes)
    assert_equal(found.weights, source[1].weights)
    assert [event["step"] for event in found.events if event["event"] == "started"] == [0]
    assert "the model starts with the weights of file://" in found.text


def test_a_run_starts_with_a_single_checkpoint(
    source: tuple[Path, Outcome], tmp_path: Path
) -> None:
    (second,) = (source[0] / "checkpoints").glob("step-00000002*")
    found = started(str(second), tmp_path)
    assert found.weights is not None
    assert source[1].weights is not None
    assert not torch.equal(found.weights["head.1.weight"], source[1].weights["head.1.weight"])


def pack(weights: Weights, path: Path) -> Path:
    torch.save(dict(weights), path.parent / "model.pt")
    with tarfile.open(path, "w:gz") as archive:
        archive.add(path.parent / "model.pt", "model.pt")
    return path


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("weights.pth", lambda weights, path: torch.save(dict(weights), path)),
        ("model.safetensors", lambda weights, path: save_file(dict(weights), path)),
        ("model.tar.gz", pack),
        ("", lambda weights, path: torch.save(dict(weights), path / "model.pt")),
    ],
)
def test_a_run_starts_with_a_file(
    name: str,
    write: Callable[[Weights, Path], object],
    source: tuple[Path, Outcome],
    tmp_path: Path,
) -> None:
    assert source[1].weights is not None
    write(source[1].weights, tmp_path / name)
    assert_equal(
        started((tmp_path / name).as_uri(), tmp_path / "run", 2).weights, source[1].weights
    )


@pytest.mark.usefixtures("aws")
def test_weights_are_read_from_s3(source: tuple[Path, Outcome], context: Context) -> None:
    objects = S3Objects("s3://cloudtrain-test/base")
    for file in (source[0] / "checkpoints").glob("*/*"):
        objects.put(f"checkpoints/{file.parent.name}/{file.name}", file.read_bytes())
    objects.put("model/model.pt", (source[0] / "model" / "model.pt").read_bytes())
    for place in ("checkpoints", "model", "model/model.pt"):
        model = Model(0.0)
        load_initial_weights(model, f"s3://cloudtrain-test/base/{place}", context)
        assert_equal(model.state_dict(), source[1].weights)
    with pytest.raises(CheckpointError, match="there is no file s3://cloudtrain-test/base/none"):
        load_initial_weights(Model(0.0), "s3://cloudtrain-test/base/none.pt", context)


def test_a_resumed_run_keeps_its_own_weights(source: tuple[Path, Outcome], tmp_path: Path) -> None:
    saving = CheckpointConfig((tmp_path / "checkpoints").as_uri(), None, None, 1, "auto")
    train = job(1, steps=3, init_from=(source[0] / "checkpoints").as_uri())
    whole = run(replace(train, steps=5), 1, tmp_path / "whole", Small)
    first = run(train, 1, tmp_path / "parts", Small, checkpoint=saving)
    rest = run(replace(train, steps=5), 1, tmp_path / "parts", Small, checkpoint=saving)
    assert first.losses + rest.losses == whole.losses
    assert_equal(rest.weights, whole.weights)
    assert "the model starts with" not in rest.text.replace(first.text, "")


@pytest.mark.parametrize("kind", ["file", "checkpoint"])
def test_keys_that_do_not_fit_are_named(
    kind: str, source: tuple[Path, Outcome], tmp_path: Path
) -> None:
    state = dict(Model(0.0).state_dict())
    state["head.1.weights"] = state.pop("head.1.weight")
    state["head.1.bias"] = torch.zeros(3)
    state["extra"] = torch.zeros(1)
    torch.save(state, tmp_path / "model.pt")
    uri = (tmp_path / "model.pt").as_uri()
    if kind == "checkpoint":
        uri = (source[0] / "checkpoints").as_uri()
    arguments = {} if kind == "file" else {"has_more": True}
    found = losses(
        job(1, init_from=uri), 1, tmp_path / "run", samples=30, task=Grown, arguments=arguments
    )
    reason = str(found.reason)
    assert "train.init_from: file://" in reason
    if kind == "file":
        assert "it has no head.1.weight (nearest: head.1.weights)" in reason
        assert "it has extra, the model does not" in reason
        assert "its head.1.bias has the shape [3], the model's has [16]" in reason
    else:
        assert "it has no more.weight" in reason


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("none.pt", None, "there is no file"),
        ("none", None, "there is no complete checkpoint, and no model.pt, at"),
        ("text.pt", b"text", "is not a file of torch.save(model.state_dict())"),
        ("text.tar.gz", b"text", "is not an archive with model.pt"),
        ("text.safetensors", b"text", "is not a safetensors file"),
    ],
)
def test_what_cannot_be_loaded_is_named(
    name: str, content: bytes | None, expected: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    found = losses(job(1, init_from=(tmp_path / name).as_uri()), 1, tmp_path / "run", samples=30)
    assert str(found.reason).startswith("CheckpointError: train.init_from: ")
    assert expected in str(found.reason)
