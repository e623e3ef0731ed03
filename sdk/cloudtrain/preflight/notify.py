"""Check of the rule that sends a message at the end of a run."""

from __future__ import annotations

from collections.abc import Iterator

from cloudtrain.job.spec import NOTIFY_TAG
from cloudtrain.planning.plan import Plan
from cloudtrain.preflight.base import Check, CheckContext, passed


def topic_of(plan: Plan) -> str | None:
    """Return the ARN of the topic that gets a message, or None."""
    return next((str(tag["Value"]) for tag in plan.request["Tags"] if tag["Key"] == NOTIFY_TAG), None)


def check_notify(context: CheckContext) -> Iterator[Check]:
    """Check that an EventBridge rule sends to the topic. Without one the job runs, and no message is sent."""
    topic = topic_of(context.plan)
    rules = context.client("events").list_rule_names_by_target(TargetArn=topic)["RuleNames"]
    if rules:
        yield passed("notify", f"the rule {', '.join(rules)} sends to {topic}")
        return
    warning = f"no EventBridge rule sends to {topic}: apply infra/ with this topic in notify_topics"
    yield passed("notify", warning, warning=warning)
