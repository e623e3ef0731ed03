"""The applied policies of infra/, stored in the repository with fixed names in place of random ones."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from support.iam_policy import Document
from support.terraform import KEY_OF_DATA

POLICIES = Path(__file__).parents[1] / "infra" / "policies.json"

EXECUTION, SUBMIT, LOOK, DEPLOY = "execution", "submit", "look", "deploy"
RECOVERY = "recovery"
IDENTITY = (EXECUTION, SUBMIT, LOOK, DEPLOY, RECOVERY)
"""Policies of identities: the execution role, the two policies of submitters, that of those who deploy models, and the
role of the function that continues runs.
"""

_RESOURCES = {
    EXECUTION: ("aws_iam_role_policy", "execution"),
    SUBMIT: ("aws_iam_policy", "submit"),
    LOOK: ("aws_iam_policy", "look"),
    DEPLOY: ("aws_iam_policy", "deploy"),
    RECOVERY: ("aws_iam_role_policy", "recovery"),
    "bucket": ("aws_s3_bucket_policy", "this"),
    "key": ("aws_kms_key", "this"),
    "s3_endpoint": ("aws_vpc_endpoint", "s3"),
}


@dataclass(frozen=True)
class AppliedPolicies:
    """The policies and outputs of an applied module, with fixed names in place of random ones.

    Attributes:
        outputs: The module's outputs.
        policies: Documents by name: those of `IDENTITY`, and those of the bucket, its key and the S3 endpoint.
    """

    outputs: Mapping[str, Any]
    policies: Mapping[str, Document]

    @classmethod
    def read(cls, path: Path = POLICIES) -> AppliedPolicies:
        """Return the stored policies."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))

    @classmethod
    def from_terraform(cls, applied: Mapping[str, Any]) -> AppliedPolicies:
        """Return the policies of a root that `support.terraform.apply_all` has applied."""
        found = {(each["type"], each["name"]): each["values"] for each in applied["resources"]}
        documents = {
            name: json.loads(found[place]["policy"])
            for name, place in _RESOURCES.items()
            if place in found
        }
        # `lustre` is for job files; the other outputs are settings.
        outputs = {name: value for name, value in applied["outputs"].items() if name != "lustre"}
        text = json.dumps({"outputs": outputs, "policies": documents}, sort_keys=True)
        for random_name, fixed in _random_names(applied["outputs"]):
            text = text.replace(random_name, fixed)
        fixed_names = json.loads(text)
        return cls(outputs=fixed_names["outputs"], policies=_sort_lists(fixed_names["policies"]))

    def write(self, path: Path = POLICIES) -> None:
        """Store the policies in the repository."""
        path.write_text(json.dumps(vars(self), indent=1, sort_keys=True) + "\n", encoding="utf-8")

    @cached_property
    def names(self) -> Mapping[str, str]:
        """Values of the placeholders in the record of calls."""
        account, region = self.outputs["role"].split(":")[4], self.outputs["region"]
        base = f":{region}:{account}:"
        return {
            "bucket": self.outputs["bucket"],
            "prefix": self.outputs["prefix"],
            "run": "first-261121-120000-0a1b2c",
            "elsewhere": "shared",
            "data": "example-images/train",
            "data-bucket": "example-images",
            "data-key": f"arn:aws:kms{base}key/{KEY_OF_DATA}",
            "role": self.outputs["role"].partition(":role/")[2],
            "caller": "ada",
            "queue": "training",
            "target": "1a2b",
            "job": "0f0f0f0f-0000-4000-8000-000000000000",
            "image": "pytorch-training",
            "file-system": "fs-0123456789abcdef0",
            "plan": "november",
            "secret": f"arn:aws:secretsmanager{base}secret:wandb-a1B2c3",
            "account": account,
            "region": region,
        }


def _sort_lists(document: Any) -> Any:
    """Return a document with sorted lists of strings. The provider sorts resources by their random names."""
    if isinstance(document, dict):
        return {name: _sort_lists(each) for name, each in document.items()}
    if isinstance(document, list):
        return (
            sorted(document)
            if all(isinstance(each, str) for each in document)
            else [*map(_sort_lists, document)]
        )
    return document


def _random_names(outputs: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield outputs["bucket"], f"{outputs['bucket'].rpartition('-')[0]}-{'0' * 16}"
    yield outputs["kms_key"].rpartition("/")[2], "00000000-0000-4000-8000-000000000000"
    for kind, names in (("subnet", outputs["subnets"]), ("sg", outputs["security_groups"])):
        for number, name in enumerate(names):
            yield name, f"{kind}-{number:017x}"


def fill(text: str, applied: AppliedPolicies) -> str:
    """Return a resource of the record with the values of its placeholders, and `x` in place of a `*`."""
    filled = re.sub(r"\{([\w-]+)\}", lambda found: applied.names[found[1]], text)
    return re.sub(r"/\*(?=/|$)", "/x", filled)
