"""A previous run, from its plan.json, which is enough to plan it again on any machine."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

from cloudtrain.errors import RunNotFoundError, SpecError, UserError
from cloudtrain.job.job_fields import SWEEP_TAG, TRIAL_TAG
from cloudtrain.job.spec import JobSpec, load_job_document
from cloudtrain.job.static_analysis.conventions import ScriptConventions
from cloudtrain.planning.plan import PLAN_VERSION, CodeInfo
from cloudtrain.planning.plan_file import PLAN_FILE
from cloudtrain.planning.resumed_fields import REFUSED_FIELDS
from cloudtrain.planning.storage_layout import ResumeSource, direct_folder_of
from cloudtrain.planning.tracking import MLFLOW_URI_VARIABLE, RUN_VARIABLES
from cloudtrain.runs.run_files import PLAN, read_fields
from cloudtrain.settings.settings import Settings
from cloudtrain.support.run_id import is_run_id
from cloudtrain.support.s3_uri import split_uri
from cloudtrain_runtime.contract import CONFIG_CHANNEL
from cloudtrain_runtime.contract.file_uri import path_of
from cloudtrain_runtime.contract.format_version import NewerFormatError, check_not_newer
from cloudtrain_runtime.contract.strict_json import decode_floats

_PLAN_FIELDS = ("job", "request", "bundle", "checkpoint")
_REQUEST_FIELDS = ("InputDataConfig", "OutputDataConfig")


def checkpoints_of(content: Mapping[str, Any], run: str) -> ResumeSource:
    """Return where a run saves its checkpoints, by its plan.json.

    Raises:
        RunNotFoundError: the plan does not contain the location.
    """
    plan = read_fields(content, PLAN)
    try:
        folder = plan["checkpoint"]["uri"]
        config = plan["config"]
        request = plan["request"]
        steps = config["checkpoint"]["uri"]
        # The plan of a script from an older cloudtrain has none. An isolated job saves to the synchronised folder.
        has_two = config["script"] is not None and folder.startswith("s3://")
        if not steps and has_two and not request.get("EnableNetworkIsolation"):
            steps = direct_folder_of(folder)
    except KeyError:
        hint = "give the folder of its checkpoints instead"
        raise RunNotFoundError(f"the plan.json of {run} is missing or damaged", hint) from None
    variables = _fields(request.get("Environment"))
    return ResumeSource(
        folder=folder,
        checkpoints=steps or folder,
        # Of a chain, that of the attempt that has saved them.
        run=plan.get("run") or run,
        uploaded=_data_by_uploaded_uri(plan),
        tracked={name: variables[name] for name in RUN_VARIABLES if name in variables},
        offline_files=str(_fields(config.get("tracking")).get("files", "")),
        training=decode_floats(_fields(config.get("training"))),
        job=_fields(plan.get("job")),
    )


def _data_by_uploaded_uri(plan: Mapping[str, Any]) -> dict[str, str]:
    """Return the original URI of each channel, by the URI that the run reads."""
    identity = _fields(_fields(plan.get("config")).get("training"))
    # A plan of cloudtrain 0.1 has no identity. The job of a resumed run names the upload instead of the original.
    written = _fields(identity.get("data")) or _fields(_fields(plan.get("job")).get("data"))
    channels = _fields(plan.get("request")).get("InputDataConfig") or []
    uploaded = {
        channel.get("ChannelName"): channel.get("DataSource", {})
        .get("S3DataSource", {})
        .get("S3Uri")
        for channel in channels
    }
    uris = {name: _fields(channel).get("uri", channel) for name, channel in written.items()}
    return {
        _as_location(uploaded[name]): uri
        for name, uri in uris.items()
        if uploaded.get(name) and isinstance(uri, str)
    }


class PreviousRun:
    """The plan of a previous run.

    Args:
        content: Content of its plan.json.

    Raises:
        UserError: a newer cloudtrain wrote the content, or it has no job, for example because an older one wrote it.
    """

    def __init__(self, content: Mapping[str, Any]) -> None:
        self._content = read_fields(content, PLAN)
        try:
            check_not_newer(PLAN_FILE, self._content, PLAN_VERSION)
        except NewerFormatError as error:
            raise UserError(str(error)) from None
        self.run = self._content.get("run", "")
        is_complete = all(part in self._content for part in _PLAN_FIELDS) and all(
            part in self._content["request"] for part in _REQUEST_FIELDS
        )
        if not self.run or not is_complete:
            raise UserError(
                f"the plan.json of {self.run or 'this run'} does not contain the job: an older cloudtrain or another "
                "program wrote it",
                "submit the job again: cloudtrain submit JOB --set checkpoint.resume=RUN",
            )

    @property
    def code(self) -> CodeInfo:
        """The code that the run uploaded."""
        bundle = self._content["bundle"]
        config = self._content.get("config", {})
        # The code is not read again: what it contains is no reason for a warning.
        conventions = ScriptConventions(
            config.get("local_rank_option"),
            starts_ranks=config.get("starts_ranks", False),
            saves_by_runtime=True,
        )
        return CodeInfo(
            digest=bundle["digest"],
            bytes=bundle["bytes"],
            files=bundle["files"],
            conventions=conventions,
        )

    @property
    def saved(self) -> ResumeSource:
        """Location of its checkpoints."""
        return checkpoints_of(self._content, self.run)

    @property
    def resumed_run(self) -> str:
        """The run that it was resumed from; empty for none."""
        named = str(_fields(_fields(self._content["job"]).get("checkpoint")).get("resume", ""))
        return named if is_run_id(named.rpartition(":")[2]) else ""

    def job(self, overrides: Iterable[str] = (), *, instances: int | None = None) -> JobSpec:
        """Return its job, with the uploaded data, that resumes from its checkpoints.

        A run that continues a trial of a sweep is no trial of it, unless an override sets the sweep's tags.

        Args:
            overrides: `path=value`, as in the option `--set`.
            instances: Replaces `cluster.instances`.

        Raises:
            SpecError: the changed job is invalid.
            UserError: an override is malformed.
        """
        document = copy.deepcopy(self._content["job"])
        code = document.get("code")
        document["data"] = self._uploaded_data(_fields(document.get("data")))
        saved = _fields(document.get("checkpoint"))
        if "uri" in saved and "://" not in str(saved["uri"]):
            # A path is relative to a job file that may not be on this machine.
            saved["uri"] = _as_location(self.saved.folder)
        document["checkpoint"] = {**saved, "resume": self.run}
        document["tags"] = _own_tags(_fields(document.get("tags")))
        tracking = _fields(document.get("tracking"))
        if tracking.get("mlflow"):
            # The path of a database is relative to the job file, too.
            variables = _fields(self._content["request"].get("Environment"))
            uri = variables.get(MLFLOW_URI_VARIABLE, tracking["mlflow"])
            document["tracking"] = {**tracking, "mlflow": uri}
        spec = load_job_document(document, f"the job of {self.run}", overrides, instances=instances)
        self._require_same_code(spec, code)
        return spec

    def _uploaded_data(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Return the channels that the run had, with the uris of the uploads."""
        sources = {
            channel["ChannelName"]: channel["DataSource"].get("S3DataSource")
            for channel in self._content["request"]["InputDataConfig"]
        }
        found: dict[str, Any] = {}
        for name, fields in data.items():
            if name not in sources:
                continue
            source = sources[name]
            if source is None:
                # A file system.
                found[name] = fields
            else:
                found[name] = {**_fields(fields), "uri": _as_location(source["S3Uri"])}
        return found

    def _base(self) -> str:
        """Return the URI of the settings' bucket and prefix. The outputs may be elsewhere (output.uri)."""
        for channel in self._content["request"]["InputDataConfig"]:
            uri = channel["DataSource"].get("S3DataSource", {}).get("S3Uri", "")
            if channel["ChannelName"] == CONFIG_CHANNEL and uri.endswith(
                end := f"/{self.run}/config/"
            ):
                return str(uri).removesuffix(end)
        return str(self._content["request"]["OutputDataConfig"]["S3OutputPath"])

    def _require_same_code(self, spec: JobSpec, before: Any) -> None:
        """Raise an error if the job names other code, because the bundle of the run is used again."""
        now = spec.to_document()["code"]
        names = [path.removeprefix("code.") for path in REFUSED_FIELDS]
        changed = [name for name in names if now.get(name) != _fields(before).get(name)]
        if changed:
            message = f"{changed[0]} cannot change: the code is the bundle of {self.run}"
            hint = f"submit the job again: cloudtrain submit JOB --set checkpoint.resume={self.run}"
            raise SpecError([spec.problem(f"code.{changed[0]}", message, hint)])

    def settings(self, now: Settings) -> Settings:
        """Return the settings of the run's account, where its code is.

        Args:
            now: Present settings, for the region, which plan.json does not contain, and the transport.
        """
        request = self._content["request"]
        output = split_uri(self._base())
        network = request.get("VpcConfig", {})
        return Settings(
            role=request.get("RoleArn"),
            bucket=output.bucket,
            prefix=output.key,
            region=now.region,
            subnets=tuple(network.get("Subnets", ())),
            security_groups=tuple(network.get("SecurityGroupIds", ())),
            kms_key=request["OutputDataConfig"].get("KmsKeyId"),
            transport=now.transport,
            sources={name: source for name, source in now.sources.items() if name == "transport"}
            | dict.fromkeys(
                ("role", "bucket", "prefix", "subnets", "security_groups", "kms_key"), self.run
            ),
        )


def _fields(channel: Any) -> dict[str, Any]:
    return dict(channel) if isinstance(channel, Mapping) else {}


def _own_tags(tags: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's tags without those that a sweep has set, whose id has the form of a run's."""
    is_trial = is_run_id(str(tags.get(SWEEP_TAG))) and TRIAL_TAG in tags
    return {
        name: value
        for name, value in tags.items()
        if not is_trial or name not in (SWEEP_TAG, TRIAL_TAG)
    }


def _as_location(uri: str) -> str:
    """Return a URI in the form of a job file: an absolute path for `file://`."""
    if not uri.startswith("file://"):
        return uri
    return str(path_of(uri))
