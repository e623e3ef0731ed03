"""Requests to a served model: their content, the model's inputs, batches, refusals and answers. Without a server."""

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.sizes import tries
from torch import nn

from cloudtrain_runtime import Task
from cloudtrain_runtime.contract import MODEL_FILE
from cloudtrain_runtime.contract.serving_config import ServingConfig
from cloudtrain_runtime.serving.payloads import NPY, RequestError, accepted_type, decode, encode
from cloudtrain_runtime.serving.predictor import Predictor

JSON = "application/json"


class Linear(Task):
    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.Linear(3, 2)

    def datasets(self) -> Any:
        raise NotImplementedError

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        raise NotImplementedError


class Words(Linear):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(8, 2))


class Own(Linear):
    def predict_input(self, payload: Any) -> Any:
        if not isinstance(payload, bytes):
            raise ValueError("expected text")  # noqa: TRY004
        return torch.tensor([[float(part) for part in payload.decode().split(",")]])

    def predict_output(self, outputs: Any) -> Any:
        return {"best": outputs.argmax(dim=1), "count": len(outputs)}


def predictor(task: Task) -> Predictor:
    return Predictor(task, task.model(), torch.device("cpu"))


def npy(array: Any) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def answer(served: Predictor, content: Any, kind: str = JSON) -> Any:
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    (result,) = served.predict([served.read(kind, body)], 16)
    if isinstance(result, RequestError):
        raise result
    return json.loads(served.write(result, "")[0])


TRAINED = """
import torch

from cloudtrain_runtime import Task


class Trained(Task):
    def model(self):
        return torch.nn.Linear(3, 2)

    def datasets(self):
        raise NotImplementedError

    def loss(self, model, batch):
        raise NotImplementedError
"""


def test_a_package_is_served_with_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "served_task.py").write_text(TRAINED)
    model = nn.Linear(3, 2)
    torch.save(model.state_dict(), tmp_path / MODEL_FILE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    served = Predictor.from_folder(tmp_path, ServingConfig("run", "served_task:Trained"))
    inputs = [[1.0, 2.0, 3.0]]
    assert answer(served, {"inputs": inputs})["outputs"] == model(torch.tensor(inputs)).tolist()


MALFORMED = [
    (JSON, b""),
    (JSON, b"{"),
    (JSON, b"\xff\xfe"),
    (JSON, b"[" * 100_000),
    (JSON, b'{"inputs": [[NaN, 1, 2]]}'),
    (JSON, b'{"inputs": [[1e999, 1, 2]]}'),
    (JSON, b'{"inputs": [[1e300, 1, 2]]}'),
    (JSON, b'{"inputs": [[1, 2, 3], [1, 2]]}'),
    (JSON, b'{"inputs": [["a", "b", "c"]]}'),
    (JSON, b'{"inputs": [[null, 1, 2]]}'),
    (JSON, b'{"inputs": [[99999999999999999999999, 1, 2]]}'),
    (JSON, b'{"inputs": []}'),
    (JSON, b'{"inputs": {}}'),
    (JSON, b'{"inputs": 7}'),
    (JSON, b'{"other": [[1, 2, 3]]}'),
    (JSON, b'{"inputs": [[1, 2, 3, 4]]}'),
    (JSON, b'"text"'),
    (JSON, b"null"),
    (NPY, b"\x93NUMPY"),
    (NPY, b"nothing"),
    (NPY, npy(np.ones((2, 3)))[:-8]),
    (NPY, npy(np.array(["a"]))),
    (NPY, npy(np.full((1, 3), np.nan))),
    (NPY, npy(np.ones((1, 3), complex))),
    (NPY, npy(np.zeros((0, 3)))),
    (NPY, npy(np.ones((1, 3))).replace(b"(1, 3)", b"(9**9,)"[:6])),
    ("image/png", b"no image"),
    ("image/png", b"\x89PNG\r\n\x1a\n" + bytes(100)),
    ("text/csv", b"1,2,3"),
    ("", b"\0"),
]
"""Content that a model with three inputs refuses, by type."""


@pytest.mark.parametrize(("kind", "body"), MALFORMED)
def test_malformed_content_is_refused(kind: str, body: bytes) -> None:
    with pytest.raises(RequestError) as refused:
        answer(predictor(Linear()), body, kind)
    assert 400 <= refused.value.status < 500
    assert refused.value.message


NUMBERS = st.one_of(
    st.floats(), st.integers(), st.sampled_from([10**400, 2**64, True, None]), st.text(max_size=3)
)
CONTENTS = st.recursive(
    NUMBERS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.sampled_from(["inputs", "instances", "weight", ""]), inner, max_size=2),
    ),
    max_leaves=12,
)
TYPES = st.sampled_from(["f2", "f4", ">f8", "i1", "u2", "u4", "?", "c8", "M8[s]", "S3", "g"])
SHAPES = st.lists(st.sampled_from([0, 1, 2, 3, 30]), max_size=3)


def status_of(task: Task, content: Any, kind: str = JSON) -> int:
    try:
        answer(predictor(task), content, kind)
    except RequestError as refused:
        return refused.status
    return 200


@pytest.mark.parametrize("task", [Linear, Words, Own])
@settings(max_examples=tries(300))
@given(content=CONTENTS)
def test_no_json_ends_the_server(task: type[Task], content: Any) -> None:
    for each in (content, {"inputs": content}):
        assert status_of(task(), each) in (200, 400, 413, 415)


@settings(max_examples=tries(300))
@given(kind=TYPES, shape=SHAPES, place=st.integers(0, 127), byte=st.integers(0, 255))
def test_no_array_ends_the_server(kind: str, shape: list[int], place: int, byte: int) -> None:
    body = bytearray(npy(np.zeros(shape, kind)))
    assert status_of(Words(), bytes(body), NPY) in (200, 400)
    body[place] = byte
    assert status_of(Words(), bytes(body), NPY) in (200, 400)


def test_an_unknown_format_of_image_names_the_known_ones() -> None:
    pytest.importorskip("PIL")
    with pytest.raises(RequestError, match=r"read: expected one of PNG, JPEG, .*TIFF$"):
        decode("image/png", b"no image")


def test_a_pickle_in_an_array_is_not_read() -> None:
    with pytest.raises(RequestError, match="not a NumPy array"):
        decode(NPY, npy(np.array([{"a": 1}], dtype=object)))


def test_json_arrays_and_lists_give_equal_answers() -> None:
    served, rows = predictor(Linear()), [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
    expected = {"outputs": Linear().model()(torch.tensor(rows)).tolist()}
    assert answer(served, {"inputs": rows}) == expected
    assert answer(served, {"instances": [[1, 2, 3], [4, 5, 6]]}) == expected
    assert answer(served, rows) == expected
    assert answer(served, npy(np.asfortranarray(rows, dtype=">f8")), NPY) == expected


def test_arrays_are_read_in_the_order_of_rows() -> None:
    array = np.arange(6.0).reshape(2, 3)
    read = decode(NPY, npy(np.asfortranarray(array)))
    assert read.flags.c_contiguous
    assert (read == array).all()
    assert decode(NPY, npy(np.array(2.0))).shape == ()


def test_an_image_becomes_one_sample_of_channels() -> None:
    image = pytest.importorskip("PIL.Image")
    out = io.BytesIO()
    image.new("RGB", (4, 2), (255, 0, 51)).save(out, "PNG")
    tensor = Linear().predict_input(decode("image/png", out.getvalue()))
    assert tensor.shape == (1, 3, 2, 4)
    assert tensor[0, :, 0, 0].tolist() == pytest.approx([1.0, 0.0, 0.2])


def test_own_methods_convert_request_and_answer() -> None:
    served = predictor(Own())
    assert answer(served, b"1,2,3", "text/csv")["count"] == 1
    with pytest.raises(RequestError, match="expected text") as refused:
        answer(served, [[1, 2, 3]])
    assert refused.value.status == 400


def test_shapes_that_the_model_does_not_take_are_refused() -> None:
    served = predictor(Linear())
    with pytest.raises(RequestError, match="does not take these inputs") as refused:
        answer(served, [[1, 2]])
    assert refused.value.status == 400
    assert len(answer(served, [[1, 2, 3]])["outputs"]) == 1, "the model still answers"


def test_indices_that_an_embedding_lacks_are_refused() -> None:
    served = predictor(Words())
    assert len(answer(served, [[0, 4]])["outputs"][0]) == 2
    with pytest.raises(RequestError, match="indices must be from 0 to 4; found 5"):
        answer(served, [[0, 5]])


def test_one_refused_request_does_not_affect_its_batch() -> None:
    served = predictor(Words())
    inputs = [served.read(JSON, body) for body in (b"[[0, 1]]", b"[[0, 9]]", b"[[2, 3], [1, 1]]")]
    first, refused, last = served.predict(inputs, 16)
    assert isinstance(refused, RequestError)
    model = served.predict([inputs[0]], 16)[0]
    torch.testing.assert_close(first, model)
    assert last.shape == (2, 2)


def test_requests_of_equal_shape_share_a_call_up_to_the_limit() -> None:
    task, sizes = Linear(), []
    model = task.model()
    model.register_forward_pre_hook(lambda _, arguments: sizes.append(len(arguments[0])))
    served = Predictor(task, model, torch.device("cpu"))
    requests = [
        served.read(JSON, json.dumps([[1, 2, 3]] * rows).encode()) for rows in (1, 2, 1, 3, 5)
    ]
    results = served.predict(requests, 4)
    # One sample and two have shown where the samples are in the outputs, once.
    assert sizes == [1, 2, 4, 3, 5]
    assert [len(each) for each in results] == [1, 2, 1, 3, 5]
    served.predict(requests[:2], 4)
    assert sizes[5:] == [3]


class Outputs(Task):
    """A model that returns what a function makes of the features [N, 3] of its samples."""

    def __init__(self, make: Callable[[torch.Tensor], Any]) -> None:
        self.make = make

    def model(self) -> nn.Module:
        make = self.make

        class Model(nn.Module):
            def forward(self, x: torch.Tensor) -> Any:
                return make(x)

        return Model()

    def datasets(self) -> dict[str, Any]:
        return {}

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch).sum()


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.sum(1),
        lambda x: {"layers": torch.stack([x, x + 1]), "x": x},  # [layers, N, features]
        lambda x: x.T,  # [features, N]
        lambda x: x.repeat_interleave(2, dim=0),  # two rows for each sample
        lambda x: x.squeeze(0),
        lambda x: x.mean(),
        lambda x: [{"label": str(float(row.sum()))} for row in x],
        lambda x: (x, float(x.sum())),
        lambda x: torch.ones(2, 3) * x.sum(),  # a length that equals the number of requests
        lambda x: x.expand(2, -1) if len(x) == 1 else x,
    ],
)
def test_an_answer_is_the_same_alone_and_with_others(make: Callable[[torch.Tensor], Any]) -> None:
    served = predictor(Outputs(make))
    bodies = [json.dumps([[each, 2.0, 3.0]]).encode() for each in (1.0, 5.0)]
    inputs = [served.read(JSON, body) for body in bodies]
    alone = [served.predict([each], 16)[0] for each in inputs]
    together = served.predict(inputs, 16)
    for mine, shared in zip(alone, together, strict=True):
        assert encode({"outputs": mine}, "application/json") == encode(
            {"outputs": shared}, "application/json"
        )


def test_an_answer_has_the_accepted_type() -> None:
    array = np.load(io.BytesIO(encode({"outputs": torch.ones(1, 2)}, accepted_type(NPY))))
    assert array.tolist() == [[1.0, 1.0]]
    assert (
        encode({"outputs": torch.tensor([float("nan")])}, accepted_type("*/*"))
        == b'{"outputs": [null]}'
    )
    for accept, content in (("text/html", {}), (NPY, {"a": 1, "b": 2})):
        with pytest.raises(RequestError) as refused:
            encode(content, accepted_type(accept))
        assert refused.value.status == 406


def test_serving_json_is_read_as_it_was_written(tmp_path: Path) -> None:
    config = ServingConfig("run", "a:B", {"x": 1}, max_batch=3, gpus=0.5)
    (tmp_path / "serving.json").write_text(config.to_json())
    assert ServingConfig.from_json((tmp_path / "serving.json").read_text()) == config
    with pytest.raises(ValueError, match="not of version"):
        ServingConfig.from_json("{}")


LANGUAGE_MODEL = """
import json
from collections.abc import Callable
from pathlib import Path
import torch
from safetensors.torch import save_file
from cloudtrain_runtime import Task

class Model(torch.nn.Linear):
    def save_pretrained(self, folder):
        Path(folder).mkdir(parents=True)
        Path(folder, "config.json").write_text("{}")
        save_file(self.state_dict(), str(Path(folder, "model.safetensors")))

class Tokenizer:
    def save_pretrained(self, folder):
        Path(folder, "tokenizer.json").write_text("{}")

class Language(Task):
    def __init__(self, has_tokenizer=True):
        if has_tokenizer:
            self.tokenizer = Tokenizer()

    def model(self):
        return Model(2, 1)

    def datasets(self):
        return {}

    def loss(self, model, batch):
        return model(batch).sum()
"""


@pytest.mark.parametrize("has_tokenizer", [True, False])
def test_a_model_with_save_pretrained_is_exported(tmp_path: Path, has_tokenizer: bool) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    package, target = tmp_path / "package", tmp_path / "out"
    (package / "code").mkdir(parents=True)
    (package / "code" / "language.py").write_text(LANGUAGE_MODEL)
    config = ServingConfig("run", "language:Language", {"has_tokenizer": has_tokenizer})
    (package / "serving.json").write_text(config.to_json())
    torch.save({"weight": torch.ones(1, 2), "bias": torch.zeros(1)}, package / "model.pt")
    command = [
        sys.executable,
        "-m",
        "cloudtrain_runtime.serving.hugging_face",
        str(package),
        str(target),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if has_tokenizer:
        assert done.returncode == 0, done.stderr
        assert safetensors.load_file(target / "model.safetensors")["weight"].tolist() == [
            [1.0, 1.0]
        ]
        assert sorted(path.name for path in target.iterdir()) == [
            "config.json",
            "model.safetensors",
            "tokenizer.json",
        ]
    else:
        assert done.returncode == 1
        assert "its tokenizer has no save_pretrained()" in done.stderr
