"""The page "What went wrong": every failure class, and every message that the failure rules recognise.

docs/reference/errors.md is written by `support.reference_pages`. A message is shown as a rule looks for it, with `…` for
what differs, and in a whole example where the logs of tests/explain have one.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from cloudtrain.failure_rules import FailureClass, explain_run
from cloudtrain.failure_rules.rules import (
    RULES,
    Advice,
    Causality,
    Jobs,
    Places,
    Rule,
    Source,
    advice_for,
    first_line_match,
    first_match,
)
from cloudtrain.failure_rules.tracebacks import parse_exception
from cloudtrain.runs.status import State, Status
from support.explanations import CASES
from support.pattern_texts import ANY, texts

MEANINGS: Mapping[FailureClass, str] = {
    FailureClass.USER_CODE: "Code, arguments or settings of the job are wrong, so that the same job would fail again.",
    FailureClass.OUT_OF_MEMORY: "Model, gradients, optimizer and activations of a rank do not fit into its GPU.",
    FailureClass.HOST_MEMORY: "The memory of an instance or of this machine is used up, its shared memory (`/dev/shm`) "
    "included.",
    FailureClass.KILLED: "A process got SIGKILL. The log does not say from whom.",
    FailureClass.NCCL: "Ranks could not exchange data. Often another rank failed first, and its own message is the cause.",
    FailureClass.HANG: "Ranks waited for one that did not come.",
    FailureClass.DATA: "Data is missing, empty or damaged, or could not be downloaded.",
    FailureClass.S3_ACCESS: "S3 refused a request, or does not have what was asked for.",
    FailureClass.IMAGE_PULL: "The container could not start, or what is in it does not fit the instance.",
    FailureClass.CAPACITY: "AWS has no free instance of this type. Nothing is wrong with the job, and nothing was billed.",
    FailureClass.QUOTA: "The account may not use as many instances of this type.",
    FailureClass.IAM: "A role or its credentials may not do what the job does.",
    FailureClass.SPOT: "AWS took the spot instances back, or gave none in time.",
    FailureClass.TIME_LIMIT: "The run was stopped at its own limit.",
    FailureClass.DEPENDENCY_INSTALL: "A Python package is missing, could not be installed, or does not fit the others.",
    FailureClass.DISK_FULL: "A disk of an instance or of this machine is full.",
    FailureClass.CHECKPOINT: "A checkpoint is missing, damaged, or of another model.",
    FailureClass.SERVICE: "SageMaker or the hardware of an instance failed. Nothing is wrong with the job.",
    FailureClass.MACHINE: "The process that supervises a local run was killed.",
    FailureClass.UNKNOWN: "The messages do not say what the cause is.",
}
"""What each class means."""

_HEAD = """\
# What went wrong

Search this page for a few words of the message: each message that cloudtrain recognises is here, with what to do.

```sh
cloudtrain explain latest
```

`cloudtrain explain` does this for you: it finds the message that came first, over all hosts and ranks, and fills in the
values of your job ([Debug a failed run](../how-to/debugging.md)). This page is made from the same rules.

- `…` stands for what differs from run to run, such as a name or a number.
- "Often an effect" marks messages that a rank also prints when another one has failed. Look for an earlier message of
  another rank.
- Messages about the job file come from `cloudtrain validate` and `plan`, before anything runs. They name the line and what
  to write: [forty mistakes](mistakes.md) shows them.
"""

_STOPS = (
    "MaxRuntimeExceeded",
    "MaxWaitTimeExceeded",
    "MaxPendingTimeExceeded",
    "interrupted",
)
"""How the reasons of runs begin that AWS or a limit has stopped."""

_RANK = re.compile(r"^\[rank\d+\]: ")
_MOST_MESSAGES = 8
_LONGEST_MESSAGE = 110
_SHORTEST_BEGINNING = 20
_PLACEHOLDER = re.compile(r"\[(?P<field>[a-z_]+(?:\.[a-z_]+)*)\]|\{(?P<found>\w+)\}")
_FIELD = re.compile(
    r"(?<![\w./`])(?:train|code|cluster|checkpoint|limits)(?!\.py\b)(?:\.[A-Za-z_][A-Za-z_0-9]*)+"
    r"(?:: (?:true|false|never|fsdp|INFO|\d+)\b)?"
)
_PLACES = {Places.CLOUD: "", Places.HERE: "on this machine"}
_JOBS = {Jobs.TASK: "", Jobs.SCRIPT: "in a script"}


@dataclass
class Entry:
    """Messages with the same advice."""

    messages: list[str]
    advice: str


def errors_page() -> str:
    """Return the content of docs/reference/errors.md."""
    found = examples()
    parts = [_HEAD]
    for failure in FailureClass:
        rules = [rule for rule in RULES if rule.failure_class is failure]
        entries = [*_entries(rules, found), *_stops_of(failure)]
        parts.append(
            f"## {failure.words[0].upper()}{failure.words[1:]}\n\n"
            f"`{failure}`. {MEANINGS[failure]} {_next_run(failure)}\n\n" + "\n".join(entries) + "\n"
        )
    return "\n".join(parts)


def _next_run(failure: FailureClass) -> str:
    if failure.is_in_the_job:
        return "Fix it, then `cloudtrain submit JOB --continue RUN` continues from the last checkpoint."
    return "When the cause is gone, `cloudtrain resume RUN` continues from the last checkpoint; without one, submit again."


def examples() -> dict[int, str]:
    """Return the shortest message in the logs of tests/explain that a rule is the first to match, by the rule's number."""
    numbers = {id(rule): number for number, rule in enumerate(RULES)}
    found: dict[int, str] = {}
    for rule, text in _matches():
        number = numbers[id(rule)]
        if number not in found or len(text) < len(found[number]):
            found[number] = text
    return found


def _matches() -> Iterator[tuple[Rule, str]]:
    for case in CASES:
        for source in (Source.REASON, Source.MESSAGE):
            if (matched := first_match(case.status.reason, source)) is not None:
                yield matched[0], case.status.reason
        for line in case.lines:
            text = _RANK.sub("", line.text).strip()
            if (matched := first_line_match(text)) is not None:
                yield matched[0], text
            is_exception = parse_exception(text) is not None
            if is_exception and (matched := first_match(text, Source.EXCEPTION)) is not None:
                yield matched[0], text


def _entries(rules: Iterable[Rule], found: Mapping[int, str]) -> Iterator[str]:
    entries: dict[str, Entry] = {}
    numbers = {id(rule): number for number, rule in enumerate(RULES)}
    for rule in rules:
        advice = _advice_of(rule)
        entry = entries.setdefault(advice, Entry([], advice))
        for message in messages_of(rule, found.get(numbers[id(rule)])):
            if message not in entry.messages:
                entry.messages.append(message)
    for entry in entries.values():
        yield _item(entry)


def messages_of(rule: Rule, example: str | None) -> list[str]:
    """Return how the messages of a rule look: an example, and what the rule looks for besides."""
    if rule.is_general:
        return ["any other exception"]
    shown = [] if example is None else [_shorten(example)]
    for text in itertools.islice(texts(rule.pattern.pattern), 60):
        if len(shown) == _MOST_MESSAGES:
            break
        words = [word for word in text.split(ANY) if word.strip()]
        if not any(all(word in other for word in words) for other in shown):
            shown.append(_shorten(text))
    return shown


def _shorten(text: str) -> str:
    text = " ".join(text.replace("`", "'").split())
    if len(text) <= _LONGEST_MESSAGE:
        return text
    return f"{text[:_LONGEST_MESSAGE].rpartition(' ')[0]} {ANY}"


def _item(entry: Entry) -> str:
    messages = [
        message if message == "any other exception" else f"`{message}`"
        for message in entry.messages
    ]
    return f"- {', '.join(messages)}\\\n  {entry.advice}"


def _advice_of(rule: Rule) -> str:
    """Return what to do: of a Task on SageMaker, then where a script or a local run differs."""
    start = "" if rule.causality is Causality.CAUSE else "*Often an effect.* "
    shown: dict[str, str] = {}
    for (job, kind), (place, where) in itertools.product(_JOBS.items(), _PLACES.items()):
        text = _plain(rule.action, job, place)
        name = " ".join(filter(None, (kind, where)))
        if text not in shown.values() and not _is_implied(shown, name):
            shown[name] = text
    first, *others = shown.items()
    rest = "".join(
        f" *{name[0].upper()}{name[1:]}:* {_without_beginning(text, first[1])}"
        for name, text in others
    )
    return f"{start}{first[1]}{rest}"


def _without_beginning(text: str, other: str) -> str:
    """Return a text with `…` in place of the sentences, or parts of one, with which another one begins, too."""
    pairs = zip(text, other, strict=False)
    common = "".join(own for own, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    ends = [
        found.end()
        for found in re.finditer(r"[.:,] ", common)
        # Not within code.
        if common.count("`", 0, found.end()) % 2 == 0
    ]
    if not ends or ends[-1] < _SHORTEST_BEGINNING:
        return text
    return f"{ANY} {text[ends[-1] :]}"


def _is_implied(shown: Mapping[str, str], name: str) -> bool:
    """Whether the names that are shown already say how a script on this machine differs."""
    return name == "in a script on this machine" and len(shown) > 1


def _plain(advice: Advice, job: Jobs, place: Places) -> str:
    """Return an advice with its fields as code, and with words in place of what a message would fill in."""

    def fill(match: re.Match[str]) -> str:
        if match["field"] == "role":
            return "of the job"
        return match["field"] or _WORDS.get(match["found"], f"<{match['found']}>")

    text = _PLACEHOLDER.sub(fill, advice_for(advice, job, place))
    text = text.replace("`", "")
    text = re.sub(r"<(\w+)>", r"`<\1>`", text)
    text = re.sub(r"\*", r"\*", text)
    text = _FIELD.sub(lambda found: f"`{found[0]}`", text)
    return re.sub(r"cloudtrain ([a-z]+(?: JOB| RUN)?(?: --local)?)", r"`cloudtrain \1`", text)


_WORDS = {
    "run": "RUN",
    "place": "the line that the message names",
    "missing": "the missing rank",
    "channel": "CHANNEL",
}


def _stops_of(failure: FailureClass) -> Iterator[str]:
    """Yield the ends of runs that no rule matches: a limit, or capacity that AWS has taken back."""
    for reason in _STOPS:
        status = Status("RUN", "sagemaker", State.STOPPED, reason)
        found = explain_run(status, ())
        if found.failure is failure:
            yield _item(Entry([f"{reason}{ANY}"], _plain(found.action, Jobs.TASK, Places.CLOUD)))
