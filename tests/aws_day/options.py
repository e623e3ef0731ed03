"""The options of the day, in the words of make, and what is wrong with them.

    PYTHONPATH=tests:sdk:entrypoints python -m aws_day.options --role ... --bucket ...

checks them before anything is installed, so this module uses the standard library and cloudtrain's sources only.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from aws_day.assumptions import ASSUMPTIONS
from aws_day.times import say
from cloudtrain.errors import CloudtrainError, did_you_mean
from cloudtrain.settings.settings import load_settings
from cloudtrain.settings.values import find_value_error

INPUT = 2
"""Exit code for wrong options."""
TRIAL_NAMES = tuple(dict.fromkeys(each.trial for each in ASSUMPTIONS if each.trial != "all"))
_EXAMPLES = {
    "ROLE": "the ARN of the execution role, such as ROLE=arn:aws:iam::123456789012:role/training",
    "BUCKET": "the name of a bucket of the role's account, such as BUCKET=my-bucket",
    "BUDGET": "dollars above 0, such as BUDGET=10",
    "AT_ONCE": "a whole number of 1 or more, such as AT_ONCE=3",
    "TRIALS": "names of trials, separated by commas, such as TRIALS='failure,grace'",
}


class MistakesError(Exception):
    """Options are wrong; `mistakes` has a line for each."""

    def __init__(self, mistakes: Sequence[str]) -> None:
        super().__init__("\n".join(mistakes))
        self.mistakes = tuple(mistakes)


@dataclass(frozen=True)
class Options:
    """The options of the day, checked.

    Attributes:
        role: ARN of the execution role.
        bucket: S3 bucket.
        region: Region; empty for that of the environment.
        budget: What the jobs of the day may cost at most, in USD.
        trials: Names of the trials; all if empty.
        at_once: How many trials run at the same time.
        out: Folder of the result.
        times: Path of a JSON file with other waiting times, or empty.
        is_dry_run: Whether nothing is started.
    """

    role: str
    bucket: str
    region: str
    budget: float
    trials: tuple[str, ...]
    at_once: int
    out: Path
    times: str
    is_dry_run: bool

    @property
    def flags(self) -> dict[str, str | None]:
        """The settings of cloudtrain."""
        # The sandbox and accounts of AWS get the same call.
        flags = {"role": self.role, "bucket": self.bucket, "region": self.region or None}
        return {**flags, "transport": "boto3"}


def read_options(
    arguments: Sequence[str] | None, environ: Mapping[str, str], description: str | None = None
) -> Options:
    """Return the options.

    Raises:
        MistakesError: Some of them are wrong. All are named.
    """
    given = _parser(description).parse_args(arguments)
    region, mistake = _find_region(given.region, environ)
    trials = tuple(each.strip() for each in given.trials.split(",") if each.strip())
    found = [
        _check_setting("ROLE", given.role, region),
        _check_setting("BUCKET", given.bucket, region),
        mistake,
        _check_budget(given.budget),
        _check_trials(given.trials, trials),
        _check_at_once(given.at_once),
    ]
    mistakes = [each for each in found if each]
    if mistakes:
        raise MistakesError(mistakes)
    return Options(
        role=given.role,
        bucket=given.bucket,
        region=given.region,
        budget=float(given.budget),
        trials=trials,
        at_once=int(given.at_once),
        out=given.out,
        times=given.times,
        is_dry_run=given.dry_run,
    )


def _find_region(given: str, environ: Mapping[str, str]) -> tuple[str, str]:
    """Return the region and what is wrong with it; each may be empty."""
    region = given
    if not region:
        try:
            region = load_settings(environ).region or ""
        except CloudtrainError as error:
            return "", error.for_terminal()
    if not region:
        return "", "REGION: your environment names no region: give one, such as REGION=us-west-2"
    if importlib.util.find_spec("botocore") is None:
        # The list of regions is botocore's, so the check after the installation finds an unknown one.
        return "", ""
    wrong = find_value_error("region", region)
    if wrong is None:
        return region, ""
    return "", f"REGION={region}: {wrong[0]}; {wrong[1]}"


def _check_setting(name: str, value: str, region: str) -> str:
    if not value:
        return _expected(name, value)
    wrong = find_value_error(name.lower(), value, region or None)
    if wrong is None:
        return ""
    return f"{name}={value}: {wrong[0]}; {wrong[1]}"


def _check_budget(text: str) -> str:
    try:
        usd = float(text)
    except ValueError:
        usd = -1.0
    if 0 < usd < float("inf"):
        return ""
    hint = ""
    if usd == 0 or "$" in text:
        hint = ". make reads $10 as 0: write 10 without a dollar sign"
    return f"{_expected('BUDGET', text)}{hint}"


def _check_trials(text: str, names: Sequence[str]) -> str:
    if text and not names:
        return _expected("TRIALS", text)
    unknown = [each for each in names if each not in TRIAL_NAMES]
    if not unknown:
        return ""
    hints = [did_you_mean(each, TRIAL_NAMES, "") for each in unknown]
    hint = "; ".join(each for each in hints if each) or f"the trials are {', '.join(TRIAL_NAMES)}"
    return f"TRIALS={text}: there is no trial {', '.join(map(repr, unknown))}; {hint}"


def _check_at_once(text: str) -> str:
    if text.isascii() and text.isdigit() and int(text) >= 1:
        return ""
    return _expected("AT_ONCE", text)


def _expected(name: str, text: str) -> str:
    return f"{name}: expected {_EXAMPLES[name]}, got {text!r}"


def _one_line(text: str) -> str:
    return "; ".join(line.strip() for line in text.splitlines())


def _parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="aws-day", description=description, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--role", default="", help="ARN of the execution role")
    parser.add_argument("--bucket", default="", help="S3 bucket")
    parser.add_argument("--region", default="", help="region; by default that of the environment")
    parser.add_argument(
        "--budget", default="", help="USD that the jobs of the day may cost at most"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("build/aws-day"), help="folder of the result"
    )
    parser.add_argument(
        "--trials", default="", help="names of trials, separated by commas; all if empty"
    )
    parser.add_argument("--at-once", default="3", help="trials at the same time")
    parser.add_argument(
        "--times", default="", help="JSON file with other waiting times, for a sandbox"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print requests and bill, start nothing"
    )
    return parser


def say_mistakes(mistakes: Sequence[str]) -> int:
    """Print a line for each mistake; return the exit code."""
    for each in mistakes:
        say(f"aws-day: {_one_line(each)}", file=sys.stderr)
    return INPUT


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the options; return 0 or 2."""
    try:
        read_options(arguments, os.environ)
    except MistakesError as error:
        return say_mistakes(error.mistakes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
