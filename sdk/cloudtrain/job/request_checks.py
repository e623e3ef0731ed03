"""Checks of a job's `request`: members that it must not set, and values of a wrong type."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import Any

from cloudtrain.catalog import service_limits
from cloudtrain.job.diagnostics import Diagnostic
from cloudtrain.job.request_members import CHANNEL_NAME, CHANNELS, DERIVED, FIELDS, REFUSED
from cloudtrain.support.field_path import FieldPath
from cloudtrain_runtime.contract import CODE_CHANNEL, CONFIG_CHANNEL


def request_errors(members: Mapping[str, Any], data: Container[str]) -> Iterator[Diagnostic]:
    """Yield what is wrong with a job's `request`: unknown or refused members, and values of a wrong type.

    The limits of the values are checked with the whole request, as those of every other field.

    Args:
        members: The value of `request`.
        data: Names of the job's channels.
    """
    refused: list[FieldPath] = []
    for path in _paths(members):
        reason = _reason(".".join(part for part in path if isinstance(part, str)))
        # A channel's name says which channel the other members belong to.
        if not reason or path[-1] == CHANNEL_NAME:
            continue
        if not any(path[: len(above)] == above for above in refused):
            refused.append(path)
            message, _, hint = reason.partition(": ")
            yield Diagnostic(message, ("request", *path), hint, is_key=True)
    for violation in service_limits.check_types(members):
        path = violation.path
        if not any(path[: len(above)] == above for above in refused):
            yield Diagnostic(
                violation.message, ("request", *path), violation.hint, is_key=violation.is_key
            )
    yield from _channel_errors(members.get(CHANNELS), data)


def valid_members(members: Mapping[str, Any], data: Container[str]) -> Mapping[str, Any]:
    """Return a job's `request` without the members that have errors, which cannot be merged."""
    wrong = {error.path[1] for error in request_errors(members, data)}
    return {name: value for name, value in members.items() if name not in wrong}


def _reason(member: str) -> str:
    """Return why `request` must not set a member, and after a colon what to do; an empty text where it may."""
    if member in FIELDS:
        return f"cloudtrain sets this member from {FIELDS[member]}: use {FIELDS[member]}"
    if member in DERIVED:
        return f"cloudtrain sets this member from {DERIVED[member]}"
    return REFUSED.get(member, "")


def _paths(value: Any, path: FieldPath = ()) -> Iterator[FieldPath]:
    """Yield the path of every member, those above before those below."""
    if isinstance(value, Mapping):
        items = [*value.items()]
    elif isinstance(value, list | tuple):
        items = [*enumerate(value)]
    else:
        return
    for key, below in items:
        if isinstance(key, str):
            yield (*path, key)
        yield from _paths(below, (*path, key))


def _channel_errors(channels: Any, data: Container[str]) -> Iterator[Diagnostic]:
    for index, channel in enumerate(channels if isinstance(channels, list | tuple) else ()):
        name = channel.get(CHANNEL_NAME) if isinstance(channel, Mapping) else None
        at: FieldPath = ("request", CHANNELS, index)
        if name is None:
            hint = f"write {CHANNEL_NAME}: and the name of a channel in data"
            yield Diagnostic(f"{CHANNEL_NAME} is missing, which names the channel", at, hint)
        elif name in (CODE_CHANNEL, CONFIG_CHANNEL):
            yield Diagnostic(
                "cloudtrain uses this channel itself",
                (*at, CHANNEL_NAME),
                "name a channel in data",
            )
        elif name not in data and "DatasetSource" not in (channel.get("DataSource") or ()):
            yield Diagnostic(
                f"there is no channel {name} in data",
                (*at, CHANNEL_NAME),
                f"add data.{name}, or rename it",
            )
