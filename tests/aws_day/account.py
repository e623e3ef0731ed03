"""The account of the day: observation with boto3, the end of every job, and the deletion of what was made."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from botocore.exceptions import ClientError

from aws_day.times import say
from cloudtrain import CloudtrainError, Settings

LOG_GROUP = "/aws/sagemaker/TrainingJobs"
FINAL = ("Completed", "Failed", "Stopped")
_MARK = "AWS_DAY "
_QUIET_LOOKS = 2
_UNANSWERED = "unknown: AWS has not answered"
_DELETED_AT_ONCE = 1000


@dataclass
class Account:
    """The AWS clients of the day.

    Attributes:
        settings: Role, bucket, region, and the day's own prefix.
        day: Name of the day; the names of all its jobs begin with it.
        known: Names of jobs that have started, which a list of AWS may not have yet.
    """

    settings: Settings
    day: str
    known: set[str] = field(default_factory=set)
    _clients: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        import boto3
        from botocore.config import Config

        session = boto3.Session(region_name=self.settings.region)
        retries = Config(retries={"mode": "standard", "total_max_attempts": 6})
        # A session is not safe for threads, a client is: all of them are made here.
        for service in ("sagemaker", "logs", "s3", "sts"):
            self._clients[service] = session.client(service, config=retries)

    def client(self, service: str) -> Any:
        """Return the client of a service."""
        return self._clients[service]

    @property
    def is_simulated(self) -> bool:
        """Whether an endpoint on this machine answers in the place of AWS."""
        address = str(self.client("sagemaker").meta.endpoint_url)
        return re.match(r"https?://(127\.|localhost|\[::1\])", address) is not None

    def caller(self) -> Mapping[str, str]:
        """Return who asks: `Account`, `Arn` and `UserId`."""
        answer: Mapping[str, str] = self.client("sts").get_caller_identity()
        return answer

    def describe(self, name: str) -> dict[str, Any]:
        """Return the response of DescribeTrainingJob."""
        answer: dict[str, Any] = self.client("sagemaker").describe_training_job(
            TrainingJobName=name
        )
        answer.pop("ResponseMetadata", None)
        return answer

    def jobs(self) -> list[Mapping[str, Any]]:
        """Return the summaries of all jobs of this day, also of those that AWS does not list yet."""
        pages = self.client("sagemaker").get_paginator("list_training_jobs")
        found = pages.paginate(NameContains=self.day, PaginationConfig={"PageSize": 100})
        listed: dict[str, Mapping[str, Any]] = {
            each["TrainingJobName"]: each
            for page in found
            for each in page["TrainingJobSummaries"]
            if each["TrainingJobName"].startswith(self.day)
        }
        for name in sorted(self.known - set(listed)):
            listed[name] = self.describe(name)
        return list(listed.values())

    def streams(self, job: str) -> list[str]:
        """Return the names of a job's log streams, without the job's name."""
        pages = self.client("logs").get_paginator("describe_log_streams")
        found: list[str] = []
        try:
            for page in pages.paginate(logGroupName=LOG_GROUP, logStreamNamePrefix=f"{job}/"):
                found += [each["logStreamName"] for each in page["logStreams"]]
        except ClientError as error:
            if error.response["Error"]["Code"] != "ResourceNotFoundException":
                raise
        return [name.removeprefix(f"{job}/") for name in found]

    def events(self, job: str) -> list[dict[str, Any]]:
        """Return what the programs of a job have printed for the day, with `ingested` in seconds since 1970."""
        found: list[dict[str, Any]] = []
        for stream in self.streams(job):
            for event in self._messages(f"{job}/{stream}"):
                _, mark, text = event["message"].partition(_MARK)
                if mark:
                    fields = json.loads(text)
                    found.append({**fields, "ingested": event["ingestionTime"] / 1000})
        return sorted(found, key=lambda each: float(each["time"]))

    def _messages(self, stream: str) -> Iterator[Mapping[str, Any]]:
        arguments = {"logGroupName": LOG_GROUP, "logStreamName": stream, "startFromHead": True}
        token = None
        while True:
            more = {} if token is None else {"nextToken": token}
            page = self.client("logs").get_log_events(**arguments, **more)
            yield from page["events"]
            if page["nextForwardToken"] == token:
                return
            token = page["nextForwardToken"]

    # ------------------------------------------------------------ the end of every job

    def stop_all(self) -> list[str]:
        """Ask every job of the day that has not ended to stop; return their names."""
        asked = []
        for each in self.jobs():
            name = each["TrainingJobName"]
            if each["TrainingJobStatus"] == "InProgress":
                asked.append(name)
                try:
                    self.client("sagemaker").stop_training_job(TrainingJobName=name)
                except ClientError as error:
                    # It has ended since it was listed.
                    if error.response["Error"]["Code"] != "ValidationException":
                        raise
        return asked

    def end_everything(self, seconds: float, poll: float) -> list[str]:
        """Stop all jobs, wait until they have ended, and end their warm pools; return what may still run.

        Trouble with AWS does not end it: it is tried again until the time is over.

        Args:
            seconds: Longest wait.
            poll: Pause between two looks, in seconds.
        """
        until = time.monotonic() + seconds
        quiet = 0
        left = [_UNANSWERED]
        while True:
            try:
                self.stop_all()
                left = [
                    each["TrainingJobName"]
                    for each in self.jobs()
                    if each["TrainingJobStatus"] not in FINAL
                ]
                if not left:
                    left = self._end_pools()
            except Exception as error:  # noqa: BLE001 (whatever it is, jobs may still run)
                say(f"stopping: {error}; trying again")
                left = [_UNANSWERED]
            # A job of the last moment may be in the second list only.
            quiet = 0 if left else quiet + 1
            if quiet == _QUIET_LOOKS or time.monotonic() > until:
                return left
            time.sleep(min(poll, 5.0))

    def _end_pools(self) -> list[str]:
        kept = [
            each["TrainingJobName"]
            for each in self.jobs()
            if each.get("WarmPoolStatus", {}).get("Status") in ("Available", "InUse")
        ]
        for name in kept:
            self.client("sagemaker").update_training_job(
                TrainingJobName=name, ResourceConfig={"KeepAlivePeriodInSeconds": 0}
            )
        return [f"warm pool of {name}" for name in kept]

    # ------------------------------------------------------------ the deletion of what was made

    def clean(self) -> dict[str, Any]:
        """Delete the objects below the day's prefix and the log streams of its jobs; return what was done."""
        # A mistake here would delete what belongs to others.
        if not f"{self.settings.prefix}/".endswith(f"/aws-day/{self.day}/"):
            raise ValueError(f"{self.settings.prefix}/ is not the prefix of this day")
        done: dict[str, Any] = {"kept": [
            "SageMaker keeps the description of each training job, and CloudWatch its metrics; neither costs anything",
        ]}  # fmt: skip
        try:
            done["objects"] = self._delete_objects()
        except Exception as error:  # noqa: BLE001 (the result must still be written)
            done["kept"].append(f"objects below the day's prefix: {error}")
        try:
            done["log_streams"] = self._delete_streams()
        except Exception as error:  # noqa: BLE001 (as above)
            done["kept"].append(f"log streams: {error}")
        return done

    def _delete_objects(self) -> int:
        prefix = f"{self.settings.prefix}/"
        s3 = self.client("s3")
        owner = {"ExpectedBucketOwner": self.settings.account} if self.settings.account else {}
        place = {"Bucket": self.settings.bucket, **owner}
        count = 0
        for page in s3.get_paginator("list_objects_v2").paginate(**place, Prefix=prefix):
            keys = [{"Key": each["Key"]} for each in page.get("Contents", ())]
            assert len(keys) <= _DELETED_AT_ONCE
            if not keys:
                continue
            answer = s3.delete_objects(**place, Delete={"Objects": keys, "Quiet": True})
            errors = answer.get("Errors", ())
            if errors:
                raise CloudtrainError(f"{len(errors)} objects: {errors[0]['Code']}")
            count += len(keys)
        return count

    def _delete_streams(self) -> int:
        count = 0
        for job in self.jobs():
            name = job["TrainingJobName"]
            for stream in self.streams(name):
                self.client("logs").delete_log_stream(
                    logGroupName=LOG_GROUP, logStreamName=f"{name}/{stream}"
                )
                count += 1
        return count
