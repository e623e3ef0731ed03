"""The `notify` section of job.yaml."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field

from cloudtrain.job.fields import Section, matching
from cloudtrain.support.aws_names import arn_pattern

_TOPIC_FORM = matching(
    re.compile(arn_pattern("sns", r"[A-Za-z0-9_-]{1,256}")),
    "the ARN of an SNS topic",
    "to list them: aws sns list-topics",
)


class Notify(Section):
    """Who gets a message when a run ends."""

    sns: Annotated[str, _TOPIC_FORM] = Field(examples=["arn:aws:sns:us-west-2:123456789012:training"])
    """ARN of the SNS topic that gets a message at the end of a run by EventBridge (infra/: notify_topics)."""
