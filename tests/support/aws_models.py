"""Read the models of AWS's services once in a process. A session of boto3 reads them for itself, 0.1 s for each service."""

from __future__ import annotations

import functools

import botocore.session


@functools.cache
def share_models() -> None:
    """Give all further sessions of this process one loader of models, as clients of one session share it."""
    botocore.session.create_loader = functools.cache(botocore.session.create_loader)
