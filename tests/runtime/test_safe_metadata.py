"""Checkpoints as untrusted data: loading never executes code from them, and plain values survive a save."""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.jobs import Cli
from torch import nn
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.optim import lr_scheduler

from cloudtrain_runtime.checkpoint.inspection import Inspection
from cloudtrain_runtime.checkpoint.manager import CheckpointManager
from cloudtrain_runtime.checkpoint.safe_metadata import deserialize, read_metadata, serialize
from cloudtrain_runtime.contract import CheckpointConfig
from cloudtrain_runtime.contract.manifest import MANIFEST_FILE, Checksums, Manifest
from cloudtrain_runtime.errors import CheckpointError
from cloudtrain_runtime.process.run_context import Context

# torch.distributed.checkpoint warns
pytestmark = [pytest.mark.promise, pytest.mark.filterwarnings("ignore")]

STEP = 7


class Evil:
    """Creates a file when it is unpickled."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> Any:
        return exec, (f"open({str(self.proof)!r}, 'w').close()",)


@pytest.fixture
def proof(tmp_path: Path) -> Path:
    """The file that exists if code in a checkpoint was executed."""
    return tmp_path / "created by a checkpoint"


@pytest.fixture
def root(context: Context, tmp_path: Path) -> Path:
    """A folder with one checkpoint that this version has saved."""
    root = tmp_path / "checkpoints"
    model, optimizer = pair()
    assert checkpoints_at(root, context).save(STEP, model, [optimizer], {}, {"lr": 0.5}, wait=True)
    return root


def checkpoints_at(root: Path, context: Context) -> CheckpointManager:
    return CheckpointManager(CheckpointConfig(root.as_uri(), None, None, 3, "auto"), context)


def pair() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def plant(root: Path, file: str, data: bytes) -> None:
    """Replace a file of the checkpoint and its checksums in the manifest, as an attacker with write access can."""
    folder = root / f"step-{STEP:08d}"
    (folder / file).write_bytes(data)
    manifest = Manifest.from_json((folder / MANIFEST_FILE).read_bytes())
    checksums = Checksums(manifest.block_bytes)
    checksums.update(data)
    changed = replace(manifest, files={**manifest.files, file: checksums.result()})
    (folder / MANIFEST_FILE).write_text(changed.to_json())


def plant_entry(root: Path, name: str, data: bytes) -> None:
    """Replace an entry that is not a tensor."""
    folder = root / f"step-{STEP:08d}"
    metadata: Metadata = pickle.loads((folder / ".metadata").read_bytes())  # noqa: S301 (saved by this test)
    stored = metadata.storage_data[MetadataIndex(name)]
    content = (folder / stored.relative_path).read_bytes()
    plant(root, stored.relative_path, content + data)
    stored.offset, stored.length = len(content), len(data)
    plant(root, ".metadata", pickle.dumps(metadata))


def resume_error(context: Context, root: Path) -> str:
    """Resume from the checkpoint, which must fail; return the error's message."""
    model, optimizer = pair()
    with pytest.raises(CheckpointError) as caught:
        checkpoints_at(root, context).resume(model, [optimizer])
    return str(caught.value)


def export(root: Path, part: str) -> Path:
    found = Inspection(str(root))
    target = root.parent / f"{part}.pt"
    found.export(found.find(), target, form="torch", part=part)
    return target


def test_code_in_the_metadata_is_not_run(root: Path, context: Context, proof: Path) -> None:
    plant(root, ".metadata", pickle.dumps(Evil(proof)))
    expected = "its metadata names builtins.exec, of which no checkpoint consists"
    message = resume_error(context, root)
    assert expected in message
    assert f"{root.as_uri()}/step-{STEP:08d}" in message
    for part in ("model", "all"):
        with pytest.raises(CheckpointError, match=expected):
            export(root, part)
    (entry,) = Inspection(str(root)).verify(lambda event: None)
    assert (entry.state, expected in entry.why) == ("unreadable", True)
    model, _ = pair()
    with pytest.raises(CheckpointError, match=expected):
        checkpoints_at(root, context).load_weights(STEP, model)
    assert not proof.exists()


@pytest.mark.parametrize("name", ["objects", "rng.rank-00000", "lr"])
def test_code_in_an_entry_is_not_run(root: Path, context: Context, proof: Path, name: str) -> None:
    metadata: Metadata = pickle.loads((root / f"step-{STEP:08d}" / ".metadata").read_bytes())  # noqa: S301 (saved here)
    entry = next(
        known
        for known in metadata.state_dict_metadata
        if known == name or known.endswith(f".{name}")
    )
    plant_entry(root, entry, saved(Evil(proof)))
    # PyTorch 2.5 also writes the name of the module.
    assert f"its entry {entry} names exec: a checkpoint holds data only" in resume_error(
        context, root
    ).replace("builtins.", "")
    with pytest.raises(
        CheckpointError, match=r"names (builtins\.)?exec: a checkpoint holds data only"
    ):
        export(root, "all")
    assert export(root, "model").is_file()
    assert not proof.exists()


def test_code_in_the_bytes_of_an_entry_is_not_run(
    root: Path, context: Context, proof: Path
) -> None:
    plant_entry(root, "objects", saved(saved({"schedule": Evil(proof)})))
    assert "its entry objects names exec" in resume_error(context, root).replace("builtins.", "")
    content = torch.load(export(root, "all"), weights_only=True)
    assert isinstance(content["objects"], bytes)
    assert not proof.exists()


def test_plain_values_of_earlier_versions_are_loaded(root: Path, context: Context) -> None:
    plant_entry(
        root,
        "objects",
        saved(saved({"schedule": {"milestones": Counter({3: 1}), "_last_lr": [0.1]}})),
    )
    model, adam = pair()
    found = checkpoints_at(root, context).resume(model, [adam])
    assert found.objects == {"schedule": {"milestones": Counter({3: 1}), "_last_lr": [0.1]}}


def test_code_instead_of_a_tensor_is_not_run(root: Path, context: Context, proof: Path) -> None:
    folder = root / f"step-{STEP:08d}"
    metadata: Metadata = pickle.loads((folder / ".metadata").read_bytes())  # noqa: S301 (saved by this test)
    index = next(index for index in metadata.storage_data if index.fqn == "model.weight")
    stored = metadata.storage_data[index]
    data = saved(Evil(proof))
    content = (folder / stored.relative_path).read_bytes()
    plant(root, stored.relative_path, content + data)
    stored.offset, stored.length = len(content), len(data)
    plant(root, ".metadata", pickle.dumps(metadata))
    assert "exec" in resume_error(context, root)
    assert not proof.exists()


def test_the_command_line_rejects_code_without_traceback(
    root: Path, proof: Path, cli: Cli, tmp_path: Path
) -> None:
    plant(root, ".metadata", pickle.dumps(Evil(proof)))
    done = cli(
        "checkpoints", "export", str(root), "--to", "torch", "-o", str(tmp_path / "model.pt")
    )
    assert done.code == 2
    assert "names builtins.exec, of which no checkpoint consists" in done.err
    assert "Traceback" not in done.err
    assert cli("checkpoints", str(root)).code == 0
    verified = cli("checkpoints", "verify", str(root))
    assert verified.code == 4
    assert "unreadable: its metadata names builtins.exec" in verified.out
    assert not proof.exists()
    assert not (tmp_path / "model.pt").exists()


def call(module: str, name: str, *arguments: Any) -> bytes:
    """Return a pickle that calls a function by its module and name."""
    parts = b"".join(pickle.dumps(argument, 2)[2:-1] for argument in arguments)
    return b"\x80\x02c" + f"{module}\n{name}\n".encode() + b"(" + parts + b"tR."


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"garbage",
        pickle.dumps(None),
        pickle.dumps({"state_dict_metadata": {}}),
        call("torch", "load", "x"),
        call("torch.serialization", "load", "x"),
        call("torch", "Tensor"),
        call("os", "getpid"),
        call("torch.distributed.checkpoint.metadata", "dataclass", int),
        call("torch.distributed.checkpoint.metadata", "os.getpid"),
        call("torch.distributed.checkpoint.filesystem", "FileSystem"),
        call("torch", "nn.Module"),
        call("torch.distributed.checkpoint.metadata", "Metadata"),
        b"\x80\x02Nr\xff\xff\xff\x2f.",  # a place in the memo for which the reader would allocate 12 GB
        b"\x80\x02Np805306367\n.",
        b"\x80\x05\x96" + (12 << 30).to_bytes(8, "little") + b".",
    ],
    ids=lambda data: repr(data[2:60]),
)
def test_invalid_metadata_is_rejected(data: bytes) -> None:
    with pytest.raises(CheckpointError, match="its metadata"):
        read_metadata(data)


def test_tensors_that_share_a_list_of_parts_are_refused() -> None:
    """A short pickle can name one list many times, and each time it would be built anew."""
    part = ChunkStorageMetadata(torch.Size([0]), torch.Size([1]))
    entry = TensorStorageMetadata(TensorProperties(), torch.Size([1]), [part] * 1000)
    data = pickle.dumps(Metadata(dict.fromkeys(map(str, range(1000)), entry), None, {}))
    assert len(data) < 20_000
    with pytest.raises(CheckpointError, match="share their lists"):
        read_metadata(data)


NESTED_KEY = b"}" + b")" + b"\x85" * 300_000 + b"Ns."
"""A dict whose key is a tuple in a tuple, and so on: Python's hash of it overflows the C stack."""


def test_a_key_that_is_nested_deeply_is_refused() -> None:
    with pytest.raises(CheckpointError, match="nested deeper"):
        read_metadata(b"\x80\x02" + NESTED_KEY)
    stored = io.BytesIO(serialize({"a": 1}, "x"))
    packed = io.BytesIO()
    with zipfile.ZipFile(stored) as given, zipfile.ZipFile(packed, "w") as out:
        for name in given.namelist():
            is_pickle = name.endswith("data.pkl")
            out.writestr(name, b"\x80\x02" + NESTED_KEY if is_pickle else given.read(name))
    with pytest.raises(CheckpointError, match="nested deeper"):
        deserialize(packed.getvalue(), "x")


def test_a_size_that_is_copied_many_times_is_refused() -> None:
    """Each call of torch.Size would make a tuple of 60,000 numbers from the same bytes."""
    data = b"\x80\x02B" + (60_000).to_bytes(4, "little") + bytes(60_000) + b"q\x00("
    data += b"ctorch\nSize\nh\x00\x85R" * 1000 + b"t."
    with pytest.raises(CheckpointError, match="60000 dimensions"):
        read_metadata(data)
    part = ChunkStorageMetadata(torch.Size([0] * 65), torch.Size([1]))
    entry = TensorStorageMetadata(TensorProperties(), torch.Size([1]), [part])
    with pytest.raises(CheckpointError, match="65 dimensions"):
        read_metadata(pickle.dumps(Metadata({"a": entry}, None, {})))
    with pytest.raises(CheckpointError, match="1000 parts"):
        read_metadata(pickle.dumps(Metadata({}, {"a": tuple("x" * 1000)}, {})))


def test_weights_of_a_torch_before_1_6_are_read() -> None:
    out = io.BytesIO()
    torch.save({"a": torch.ones(3)}, out, _use_new_zipfile_serialization=False)
    assert deserialize(out.getvalue(), "x")["a"].tolist() == [1, 1, 1]


def test_large_metadata_is_not_nested_deeply() -> None:
    """A pickler adds to a dict in parts of a thousand."""
    entry = BytesStorageMetadata()
    count = 250_000
    read = read_metadata(
        pickle.dumps(Metadata(dict.fromkeys(map(str, range(count)), entry), None, {}))
    )
    assert len(read.state_dict_metadata) == count


def test_compressed_entries_are_refused() -> None:
    """A reader would unpack 100 KB to 100 MB. torch.save compresses nothing."""
    stored = io.BytesIO(serialize({"zeros": torch.zeros(1000)}, "x"))
    packed = io.BytesIO()
    with (
        zipfile.ZipFile(stored) as given,
        zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as out,
    ):
        for name in given.namelist():
            out.writestr(name, given.read(name))
    assert deserialize(stored.getvalue(), "x")["zeros"].shape == (1000,)
    with pytest.raises(CheckpointError, match="compressed"):
        deserialize(packed.getvalue(), "x")


def test_metadata_cannot_change_dcps_classes() -> None:
    """A pickle can set attributes of an object that it names, for example of a class."""
    named = b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n"
    slots = b"(N}X\x05\x00\x00\x00evilsK\x01stb."
    with pytest.raises(CheckpointError):
        read_metadata(
            named
            + slots.replace(b"}X\x05\x00\x00\x00evilsK\x01s", b"}X\x05\x00\x00\x00evilsK\x01s")
        )
    assert not hasattr(Metadata, "evils")


def test_real_metadata_is_read_as_dcp_reads_it(root: Path) -> None:
    data = (root / f"step-{STEP:08d}" / ".metadata").read_bytes()
    theirs: Metadata = pickle.loads(data)  # noqa: S301 (saved by this test)
    ours = read_metadata(data)
    for entry in theirs.state_dict_metadata.values():
        if hasattr(getattr(entry, "properties", None), "strides"):
            entry.properties.strides = None  # an attribute of PyTorch 2.15 that no load reads
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.storage_data == theirs.storage_data
    assert ours.planner_data == theirs.planner_data


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)


def schedules() -> dict[str, Callable[[torch.optim.Optimizer], Any]]:
    return {
        "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: np.cos(step / 10)),
        "multiplicative": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.5),
        "multi_step": lambda o: lr_scheduler.MultiStepLR(o, [1, 2, 2]),
        "plateau": lr_scheduler.ReduceLROnPlateau,
        "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.1, 1.0),
        "one_cycle": lambda o: lr_scheduler.OneCycleLR(o, 1.0, 10),
        "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
        "polynomial": lr_scheduler.PolynomialLR,
        "swa": lambda o: torch.optim.swa_utils.SWALR(o, 0.05),
        "sequential": lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o), lr_scheduler.CosineAnnealingLR(o, 5)], [2]
        ),
        "chained": lambda o: lr_scheduler.ChainedScheduler(
            [lr_scheduler.LinearLR(o), lr_scheduler.ConstantLR(o)]
        ),
    }


@pytest.mark.parametrize("name", schedules())
def test_schedules_of_torch_survive_a_round_trip(name: str) -> None:
    first, second = optimizer(), optimizer()
    schedule, other = (schedules()[name](each) for each in (first, second))
    for _ in range(3):
        first.step()
        schedule.step(*((np.float64(1.0),) if name == "plateau" else ()))
    state = schedule.state_dict()
    if callable(state.get("anneal_func")):  # SWALR of PyTorch 2.5
        with pytest.raises(CheckpointError, match=r"swa\.anneal_func is a function"):
            serialize(state, name)
        return
    other.load_state_dict(deserialize(serialize(state, name), name))
    assert str(other.state_dict()) == str(state)


@pytest.mark.parametrize(
    "value",
    [
        np.float64(0.25),
        np.float32(0.1),
        np.bool_(True),
        np.arange(6, dtype=np.int16).reshape(2, 3),
        np.zeros((0, 4)),
        np.array(3.5),
        np.array(["one", "two"]),
        np.datetime64("2026-11-20"),
        OrderedDict(a=[np.uint8(3), (np.float64("nan"),)]),
        {"text": "x", "bytes": b"y", "none": None, "big": 2**100, 3: {1.5: True}},
        Counter({3: 1}),
    ],
    ids=repr,
)
def test_plain_values_survive_a_round_trip(value: Any) -> None:
    found = deserialize(serialize(value, "value"), "value")
    assert type(found) is type(value)
    assert repr(found) == repr(value)


@pytest.mark.parametrize("value", [{1, 2}, torch.Size([2, 3]), torch.float16, b"", 1j], ids=repr)
def test_a_value_is_restored_equal_or_rejected(value: Any) -> None:
    try:
        data = serialize(value, "value")
    except CheckpointError:
        return
    assert deserialize(data, "value") == value


class Warm:
    """A custom schedule with an attribute that is a function."""

    def __init__(self) -> None:
        self.curve = print
        self.name = "warm"

    def __call__(self, step: int) -> float:
        del step
        return 1.0


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            {"schedule": lr_scheduler.LambdaLR(optimizer(), Warm()).state_dict()},
            r"objects\.schedule\.lr_lambdas\.0\.curve",
        ),
        (
            {"schedule": {"of": [1, SimpleNamespace()]}},
            r"objects\.schedule\.of\.1 is a types\.SimpleNamespace, which",
        ),
        (
            {"schedule": {"of": lambda: 1}},
            r"objects\.schedule\.of is a function, which cannot be loaded again without running code",
        ),
        ({"path": Path("x")}, r"objects\.path is a pathlib"),
        ({"array": np.array([print], dtype=object)}, r"objects\.array is a numpy\.ndarray"),
        ({"big": 2**3000}, r"objects\.big is a int"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_values_that_cannot_be_loaded_are_rejected_by_name(value: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        serialize(value, "objects")


def test_a_save_rejects_values_that_cannot_be_loaded(context: Context, tmp_path: Path) -> None:
    model, adam = pair()
    checkpoints = checkpoints_at(tmp_path / "new", context)
    objects = {"schedule": {"curve": print}}
    with pytest.raises(
        CheckpointError, match=r"objects\.schedule\.curve is a builtin_function_or_method"
    ):
        checkpoints.save(1, model, [adam], {}, objects, wait=True)
    adam.param_groups[0]["curve"] = print
    with pytest.raises(CheckpointError, match="AdamW's curve is a builtin_function_or_method"):
        checkpoints.resume(model, [adam])


def test_numpy_learning_rates_are_saved(context: Context, tmp_path: Path) -> None:
    model, adam = pair()
    adam.param_groups[0]["lr"] = np.float64(0.25)
    assert checkpoints_at(tmp_path, context).save(
        1, model, [adam], {}, {"best": np.float32(0.1)}, wait=True
    )
    other, another = pair()
    found = checkpoints_at(tmp_path, context).resume(other, [another])
    assert found.objects == {"best": np.float32(0.1)}
    assert (another.param_groups[0]["lr"], type(another.param_groups[0]["lr"])) == (
        0.25,
        np.float64,
    )


def test_a_manifest_is_plain_json(root: Path) -> None:
    content: Mapping[str, Any] = json.loads((root / f"step-{STEP:08d}" / MANIFEST_FILE).read_text())
    assert content["version"]


def old_reduce(member: Any, _protocol: int) -> tuple[Any, ...]:
    """Return how Python 3.11.0 to 3.11.3 pickles a member of an enumeration."""
    return getattr, (type(member), member.name)


def test_metadata_of_the_first_pythons_3_11_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    properties = TensorProperties(dtype=torch.float32)
    parts = [ChunkStorageMetadata(torch.Size([0]), torch.Size([2]))]
    entry = TensorStorageMetadata(properties, torch.Size([2]), parts)
    metadata = Metadata({"x": entry}, planner_data={}, storage_data={})
    memory_format = type(properties.__getstate__()[3])
    monkeypatch.setattr(memory_format, "__reduce_ex__", old_reduce)
    data = pickle.dumps(metadata)
    assert b"getattr" in data
    (found,) = read_metadata(data).state_dict_metadata.values()
    assert isinstance(found, TensorStorageMetadata)
    assert found.properties.dtype == torch.float32


class Attribute:
    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (str, "format")


def test_an_attribute_of_anything_else_is_refused() -> None:
    with pytest.raises(CheckpointError):
        read_metadata(pickle.dumps(Attribute()))
