"""Named resources of the sandbox's account, with AWS's rules for names, tags and lists."""

from __future__ import annotations

import base64
import functools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from cloudtrain.backends.sandbox.process import ACCOUNT, REGION
from cloudtrain.backends.sandbox.request_validation import ServiceError, validation_error
from cloudtrain_runtime.contract.strict_json import dump_json, load_json

Document = Mapping[str, Any]
Operations = Mapping[str, Callable[[Document], Document]]
"""Operations of a service by AWS's name: each takes a request document and returns a response document."""

PAGE = 10
"""Default of MaxResults (API reference of ListTrainingJobs)."""
MAX_PAGE = 100


class Resource(Protocol):
    """A resource of the account."""

    name: str
    arn: str
    tags: list[dict[str, str]]

    def summary(self) -> dict[str, Any]:
        """Return its entry in a list."""


R = TypeVar("R", bound=Resource)


class Resources(Generic[R]):
    """The resources of one kind. Thread-safe.

    Args:
        kind: AWS's name of the kind, with which members of requests begin, such as `TrainingJob`.
        label: Its name in messages and, with hyphens, in ARNs.
        taken: Code and message of the error about a name that exists; the message may use `{arn}`.
        missing: Code and message of the error about a name that does not exist.
    """

    def __init__(
        self, kind: str, label: str, *, taken: tuple[str, str], missing: tuple[str, str]
    ) -> None:
        self.kind = kind
        self.label = label
        self._taken = taken
        self._missing = missing
        self._lock = threading.Lock()
        self._found: dict[str, R] = {}

    def all(self) -> list[R]:
        """Return all resources, oldest first."""
        with self._lock:
            return list(self._found.values())

    def arn(self, name: str) -> str:
        """Return the ARN of a name."""
        return arn_of(self.label.replace(" ", "-"), name)

    def get(self, name: str) -> R | None:
        """Return a resource by its name, or None."""
        return self._found.get(name)

    def find(self, request: Document) -> R:
        """Return the resource that a request names.

        Raises:
            ServiceError: There is none.
        """
        name = str(request.get(f"{self.kind}Name"))
        found = self.get(name)
        if found is None:
            raise _error(self._missing, name, self.arn(name))
        return found

    def check_free(self, name: str) -> None:
        """Check that no resource has a name.

        Raises:
            ServiceError: One has it.
        """
        if (found := self._found.get(name)) is not None:
            raise _error(self._taken, name, found.arn)

    def add(self, resource: R) -> R:
        """Add a resource.

        Raises:
            ServiceError: Its name exists.
        """
        with self._lock:
            self.check_free(resource.name)
            self._found[resource.name] = resource
        return resource

    def remove(self, name: str) -> None:
        """Remove a resource."""
        with self._lock:
            self._found.pop(name, None)

    def page(
        self, summaries: Iterable[Document], request: Document, order: str
    ) -> tuple[list[Document], Document]:
        """Return the page that a request selects by name and times, and the token of the next page if there is one.

        `order` is the SortBy and SortOrder of a request without them, separated by a space.
        """
        part = str(request.get("NameContains", "")).lower()
        found = [
            each
            for each in summaries
            if part in each[f"{self.kind}Name"].lower() and _is_within(each, request)
        ]
        return page_of(found, request, self.kind, order)


def arn_of(kind: str, name: str) -> str:
    """Return the ARN of a resource of SageMaker."""
    return f"arn:aws:sagemaker:{REGION}:{ACCOUNT}:{kind}/{name}"


def without_none(fields: Document) -> dict[str, Any]:
    """Return the fields of a response that have a value."""
    return {name: value for name, value in fields.items() if value is not None}


def page_of(
    items: Iterable[Document], request: Document, kind: str, order: str, size: int = PAGE
) -> tuple[list[Document], Document]:
    """Return a sorted page of items, and the token of the next page if there is one (see `Resources.page`).

    Items with equal values are sorted by name. The token holds the sort key of the page's last item, so that new items
    do not shift the next page.
    """
    default_by, default_order = order.split()
    by = str(request.get("SortBy", default_by))
    field = f"{kind}{by}" if by in ("Name", "Status") else by
    is_descending = request.get("SortOrder", default_order) == "Descending"
    size = request.get("MaxResults", size)
    check_size("maxResults", size, 1, MAX_PAGE)

    def key(item: Document) -> list[Any]:
        return [item.get(field, 0), item[f"{kind}Name"]]

    found = sorted(items, key=key, reverse=is_descending)
    if "NextToken" in request:
        try:
            last = load_json(base64.urlsafe_b64decode(request["NextToken"]))
        except ValueError:
            raise validation_error("Invalid NextToken") from None
        found = [
            item for item in found if (key(item) < last if is_descending else key(item) > last)
        ]
    page = found[:size]
    if len(found) <= size:
        return page, {}
    return page, {"NextToken": base64.urlsafe_b64encode(dump_json(key(page[-1])).encode()).decode()}


def check_size(name: str, value: int, least: int, most: int) -> None:
    """Check a number of a request against its bounds.

    Raises:
        ServiceError: It is not within them.
    """
    if not least <= value <= most:
        side, bound = ("greater", least) if value < least else ("less", most)
        raise validation_error(
            f"1 validation error detected: Value '{value}' at '{name}' failed to satisfy constraint: "
            f"Member must have value {side} than or equal to {bound}"
        )


def tag_operations(collections: Sequence[Resources[Any]]) -> Operations:
    """Return the operations on tags of the resources."""

    def collection_of(request: Document) -> Resources[Any]:
        arn = str(request["ResourceArn"])
        for each in collections:
            if arn.startswith(each.arn("")):
                return each
        raise validation_error(f"cloudtrain sandbox: tags of {arn} are not supported")

    def list_tags(request: Document) -> Document:
        arn = str(request["ResourceArn"])
        found = next((each for each in collection_of(request).all() if each.arn == arn), None)
        if found is None:
            raise validation_error(f"Could not find resource {arn}.")
        return {"Tags": found.tags}

    def refuse(operation: str, request: Document) -> Document:
        label = collection_of(request).label
        raise validation_error(f"cloudtrain sandbox: {operation} is not supported for {label}s")

    refused = {name: functools.partial(refuse, name) for name in ("AddTags", "DeleteTags")}
    return {"ListTags": list_tags, **refused}


def _error(code_and_message: tuple[str, str], name: str, arn: str) -> ServiceError:
    code, message = code_and_message
    return ServiceError(code, message.format(name=name, arn=arn))


def _is_within(summary: Document, request: Document) -> bool:
    """Whether the times of a summary are within those of a request, which are exclusive."""
    for name in ("CreationTime", "LastModifiedTime"):
        if (
            not request.get(f"{name}After", -1)
            < summary.get(name, 0)
            < request.get(f"{name}Before", float("inf"))
        ):
            return False
    return True
