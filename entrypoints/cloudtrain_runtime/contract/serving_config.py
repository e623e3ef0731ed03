"""`serving.json`: how a model is served, written by the SDK into the model's package and read by the server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final

from cloudtrain_runtime.contract.format_version import check_not_newer
from cloudtrain_runtime.contract.strict_json import dump_json, load_json

SERVING_FILE: Final = "serving.json"
SERVING_CODE: Final = "code"
"""Folder of the package with the job's code, where AWS's image looks for requirements.txt, too."""
MAX_REQUEST_BYTES: Final = 6 * 2**20
"""Largest body of a request. Source: `BodyBlob` of InvokeEndpoint in botocore's model."""

SERVING_VERSION: Final = 1


@dataclass(frozen=True)
class ServingConfig:
    """How a model is served.

    Attributes:
        run: The run that trained the model.
        task: `module:Class` of the Task.
        args: Its arguments.
        max_batch: Most samples that the model gets at once, from requests that wait together.
        batch_wait_seconds: How long a request waits for others.
        replicas: Number of processes with the model.
        gpus: GPUs of a replica; a fraction shares a GPU between replicas.
    """

    run: str
    task: str
    args: Mapping[str, Any] = field(default_factory=dict)
    max_batch: int = 16
    batch_wait_seconds: float = 0.0
    replicas: int = 1
    gpus: float = 0.0

    def to_json(self) -> str:
        """Return the content of `serving.json`."""
        return (
            dump_json({"version": SERVING_VERSION, **asdict(self)}, indent=1, sort_keys=True) + "\n"
        )

    @classmethod
    def from_json(cls, text: str) -> ServingConfig:
        """Read the content of `serving.json`.

        Raises:
            ValueError: it is of another version, or no such document.
        """
        content = load_json(text)
        check_not_newer(SERVING_FILE, content, SERVING_VERSION)
        if not isinstance(content, dict) or content.get("version") != SERVING_VERSION:
            raise ValueError(f"{SERVING_FILE} is not of version {SERVING_VERSION}")
        known = {each.name for each in fields(cls)}
        try:
            return cls(**{name: value for name, value in content.items() if name in known})
        except TypeError as error:
            raise ValueError(f"{SERVING_FILE}: {error}") from None
