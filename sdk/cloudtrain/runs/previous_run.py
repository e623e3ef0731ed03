"""An earlier run, read off its plan.json: enough to plan it again from anywhere, with nothing of it on this machine."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from cloudtrain.errors import RunNotFoundError, SpecError, UserError
from cloudtrain.job.script_conventions import Conventions
from cloudtrain.job.spec import JobSpec, load_job_document
from cloudtrain.planning.plan import CodeInfo
from cloudtrain.planning.storage_layout import ResumeSource, direct_folder_of
from cloudtrain.runs.run_files import PLAN, read_fields
from cloudtrain.settings.settings import Settings
from cloudtrain.support.s3_uri import split_uri
from cloudtrain_runtime.contract import CODE_CHANNEL, CONFIG_CHANNEL

_PARTS = ("job", "request", "bundle", "checkpoint")
_OF_REQUEST = ("InputDataConfig", "OutputDataConfig")
_CODE = ("directory", "task", "script", "requirements")


def saved_by(content: Mapping[str, Any], run: str) -> ResumeSource:
    """Return where a run has saved its checkpoints.

    Args:
        content: Its plan.json.
        run: Its id.

    Raises:
        RunNotFoundError: its plan does not tell.
    """
    plan = read_fields(content, PLAN)
    try:
        folder = plan["checkpoint"]["uri"]
        config, request = plan["config"], plan["request"]
        steps = config["checkpoint"]["uri"]
        # A script of an older cloudtrain has none there; what cannot reach S3 saves to the folder that is synced.
        has_two = config["script"] is not None and folder.startswith("s3://")
        if not steps and has_two and not request.get("EnableNetworkIsolation"):
            steps = direct_folder_of(folder)
    except KeyError:
        hint = "give the folder of its checkpoints instead"
        raise RunNotFoundError(f"the plan.json of {run} is missing or damaged", hint) from None
    return ResumeSource(folder, steps or folder, run, _uploaded(plan))


def _uploaded(plan: Mapping[str, Any]) -> dict[str, str]:
    """Return what the training's identity names for each channel, by the uri that the run has it at."""
    identity = _fields(_fields(plan.get("config")).get("training"))
    # A plan of cloudtrain 0.1 has no identity. The job of a resumed run names the upload instead of what was uploaded.
    written = _fields(identity.get("data")) or _fields(_fields(plan.get("job")).get("data"))
    channels = _fields(plan.get("request")).get("InputDataConfig") or []
    placed = {
        channel.get("ChannelName"): channel.get("DataSource", {}).get("S3DataSource", {}).get("S3Uri")
        for channel in channels
    }
    uris = {name: _fields(channel).get("uri", channel) for name, channel in written.items()}
    return {_place(placed[name]): uri for name, uri in uris.items() if placed.get(name) and isinstance(uri, str)}


class PreviousRun:
    """What was decided for a run.

    Args:
        content: Its plan.json.

    Raises:
        UserError: it holds no job: an older cloudtrain has written it.
    """

    def __init__(self, content: Mapping[str, Any]) -> None:
        self._content = read_fields(content, PLAN)
        self.run = self._content.get("run", "")
        is_whole = all(part in self._content for part in _PARTS)
        if not self.run or not is_whole or not all(part in self._content["request"] for part in _OF_REQUEST):
            raise UserError(
                f"the plan.json of {self.run or 'this run'} does not hold the job: an older cloudtrain, or something "
                "else, has written it",
                "submit the job again: cloudtrain submit JOB --set checkpoint.resume=RUN",
            )

    @property
    def code(self) -> CodeInfo:
        """The code, which lies where the run has put it."""
        bundle = self._content["bundle"]
        config = self._content.get("config", {})
        conventions = Conventions(config.get("local_rank_option"), starts_ranks=config.get("starts_ranks", False))
        return CodeInfo(bundle["digest"], bundle["bytes"], bundle["files"], conventions=conventions)

    @property
    def saved(self) -> ResumeSource:
        """Where its checkpoints lie."""
        return saved_by(self._content, self.run)

    def job(self, overrides: Iterable[str] = (), *, instances: int | None = None) -> JobSpec:
        """Return its job with the data where the run has it, and its checkpoints to go on from.

        Args:
            overrides: `path=value`, as the `--set` option takes them.
            instances: Replaces `cluster.instances`.

        Raises:
            SpecError: the changed job does not validate.
            UserError: an override is malformed.
        """
        document = copy.deepcopy(self._content["job"])
        code, data = document.get("code"), _fields(document.get("data"))
        channels = {channel["ChannelName"]: channel for channel in self._content["request"]["InputDataConfig"]}
        document["data"] = {
            name: {**_fields(data.get(name)), "uri": _place(channel["DataSource"]["S3DataSource"]["S3Uri"])}
            for name, channel in channels.items()
            if name not in (CODE_CHANNEL, CONFIG_CHANNEL)
        }
        saved = _fields(document.get("checkpoint"))
        if "uri" in saved and "://" not in str(saved["uri"]):
            saved["uri"] = _place(self.saved.folder)  # relative to a job file that need not be here
        document["checkpoint"] = {**saved, "resume": self.run}
        spec = load_job_document(document, f"the job of {self.run}", overrides, instances=instances)
        self._refuse_other_code(spec, code)
        return spec

    def _refuse_other_code(self, spec: JobSpec, before: Any) -> None:
        """Refuse other files of the code: what travels is what the run has packed."""
        now = spec.to_document()["code"]
        changed = [name for name in _CODE if now.get(name) != _fields(before).get(name)]
        if changed:
            message = f"{changed[0]} cannot change: the code is what {self.run} has packed"
            hint = f"submit the job anew: cloudtrain submit JOB --set checkpoint.resume={self.run}"
            raise SpecError([spec.problem(f"code.{changed[0]}", message, hint)])

    def settings(self, now: Settings) -> Settings:
        """Return the account as the run had it. Its code lies there; how a request is sent is today's choice.

        Args:
            now: Today's settings: the region, because a run id does not tell it, and the transport.
        """
        request = self._content["request"]
        place = split_uri(request["OutputDataConfig"]["S3OutputPath"])
        network = request.get("VpcConfig", {})
        return Settings(
            role=request.get("RoleArn"),
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
