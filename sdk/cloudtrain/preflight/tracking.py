"""Check of the MLflow server: whether it answers this machine."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Iterator

from cloudtrain.planning.tracking import MLFLOW_URI_VARIABLE
from cloudtrain.preflight.base import CONNECT_SECONDS, Check, CheckContext, passed
from cloudtrain_runtime.contract.redaction import redact


def check_tracking(context: CheckContext) -> Iterator[Check]:
    """Ask the server for its health. Without an answer a run trains all the same, so this is a warning only."""
    uri = redact(context.plan.request["Environment"][MLFLOW_URI_VARIABLE])
    if not uri.startswith(("http://", "https://")):
        yield passed("tracking", f"{uri} (its permissions are part of the role's)")
        return
    try:
        with urllib.request.urlopen(f"{uri.rstrip('/')}/health", timeout=CONNECT_SECONDS):  # noqa: S310 (http, see above)
            yield passed("tracking", f"{uri} answers")
    except urllib.error.HTTPError as error:  # such as 401: it answers
        yield passed("tracking", f"{uri} answers with status {error.code}")
    except (OSError, ValueError) as error:
        reason = redact(str(getattr(error, "reason", error)))
        warning = (
            f"tracking.mlflow: {uri} does not answer this machine ({reason}). A run that cannot reach it trains "
            "without it, and reports how many values it has dropped"
        )
        yield passed("tracking", f"{uri} does not answer this machine", warning=warning)
