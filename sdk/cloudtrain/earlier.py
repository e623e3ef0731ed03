"""An earlier run, read off its plan.json: enough to plan it again from anywhere, with nothing of it on this machine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from cloudtrain.errors import UserError
from cloudtrain.plan import CodeInfo
from cloudtrain.request import split_uri
from cloudtrain.settings import Settings
from cloudtrain.spec import JobSpec, read_document_again
from cloudtrain_runtime.contract import CODE_CHANNEL, CONFIG_CHANNEL


class EarlierRun:
    """What was decided for a run.

    Args:
        content: Its plan.json.

    Raises:
        UserError: it holds no job: an older cloudtrain has written it.
    """

    def __init__(self, content: Mapping[str, Any]) -> None:
        self._content = content
        self.run = str(content.get("run", ""))
        if not content.get("job"):
            raise UserError(
                f"the plan of {self.run} does not hold its job", "submit the job again: --set checkpoint.resume=RUN"
            )

    @property
    def code(self) -> CodeInfo:
        """The code, which lies where the run has put it."""
        bundle = self._content["bundle"]
        return CodeInfo(bundle["digest"], bundle["bytes"], bundle["files"])

    @property
    def checkpoints(self) -> str:
        """Uri of the folder of its checkpoints."""
        return str(self._content["checkpoint"]["uri"])

    def job(self, overrides: Iterable[str] = (), *, instances: int | None = None) -> JobSpec:
        """Return its job with the data where the run has it, and its checkpoints to go on from.

        Args:
            overrides: `path=value`, as the `--set` option takes them.
            instances: Replaces `cluster.instances`.

        Raises:
            SpecError: the changed job does not validate.
            UserError: an override is malformed.
        """
        document = dict(self._content["job"])
        channels = {channel["ChannelName"]: channel for channel in self._content["request"]["InputDataConfig"]}
        document["data"] = {
            name: {**_fields(document["data"][name]), "uri": _place(channel["DataSource"]["S3DataSource"]["S3Uri"])}
            for name, channel in channels.items()
            if name not in (CODE_CHANNEL, CONFIG_CHANNEL)
        }
        saved = dict(document.get("checkpoint", {}))
        if "uri" in saved and "://" not in str(saved["uri"]):
            saved["uri"] = _place(self.checkpoints)  # relative to a job file that need not be here
        document["checkpoint"] = {**saved, "resume": _place(self.checkpoints)}
        return read_document_again(document, f"the job of {self.run}", overrides, instances=instances)

    def settings(self, now: Settings) -> Settings:
        """Return the account as the run had it. Its code lies there; how a request is sent is today's choice.

        Args:
            now: Today's settings: the region, because a run id does not tell it, and the transport.
        """
        request = self._content["request"]
        place = split_uri(request["OutputDataConfig"]["S3OutputPath"])
        network = request.get("VpcConfig", {})
        return Settings(
            role=request["RoleArn"],
            bucket=place.bucket,
            prefix=place.key,
            region=now.region,
            subnets=tuple(network.get("Subnets", ())),
            security_groups=tuple(network.get("SecurityGroupIds", ())),
            kms_key=request["OutputDataConfig"].get("KmsKeyId"),
            transport=now.transport,
            sources=dict.fromkeys(("role", "bucket", "prefix", "subnets", "security_groups", "kms_key"), self.run),
        )


def _fields(channel: Any) -> dict[str, Any]:
    return dict(channel) if isinstance(channel, Mapping) else {}


def _place(uri: str) -> str:
    """Return a uri as a job file takes it: an absolute path where it lies on this machine."""
    return str(Path(unquote(urlparse(uri).path))) if uri.startswith("file://") else uri
