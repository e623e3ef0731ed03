"""The chains of an account in S3, as each machine finds them: their records, and requests to end them.

Only the controller of a chain writes its record, which is below `<prefix>/chains/<chain>/`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from cloudtrain.aws.errors import aws_errors
from cloudtrain.aws.s3_objects import HIDDEN_OBJECT, find_object, put_object
from cloudtrain.runs.attempt_chain import CHAIN_FILE, CHAINS_FOLDER, Chain, parse_chain
from cloudtrain.support.backend_facts import facts_of
from cloudtrain.support.controller_files import STOP_FILE

if TYPE_CHECKING:
    from types_boto3_s3 import S3Client

    from cloudtrain.backends.base import Backend


@dataclass(frozen=True)
class AccountChains:
    """The chains below a prefix of the account's bucket.

    Attributes:
        s3: boto3's S3 client.
        base: The folder that has a folder of each chain: `s3://bucket/prefix/chains`.
    """

    s3: S3Client
    base: str

    @classmethod
    def of(cls, backend: Backend) -> Self | None:
        """Return the chains of a backend's account; None for a backend without one.

        Raises:
            CloudError: There are no credentials.
        """
        if not facts_of(backend.name).uses_account:
            return None
        from cloudtrain.aws.s3_download import make_s3_client_of

        account = backend.target().settings
        with aws_errors("connect to S3"):
            s3 = make_s3_client_of(backend.storage_environ())
        prefix = f"s3://{account.bucket}/{account.prefix}".rstrip("/")
        return cls(s3, f"{prefix}/{CHAINS_FOLDER}")

    def uri_of(self, chain: str) -> str:
        """Return the folder of a chain."""
        return f"{self.base}/{chain}"

    def read(self, chain: str) -> Chain | None:
        """Return the record of a chain, or None if there is none.

        Raises:
            UserError: It is damaged, or another program wrote it.
            CloudError: AWS refused or cannot be reached.
        """
        uri = f"{self.uri_of(chain)}/{CHAIN_FILE}"
        with aws_errors(f"read {uri}"):
            found = find_object(self.s3, uri, HIDDEN_OBJECT)
        return None if found is None else parse_chain(found.body, uri)

    def request_stop(self, chain: str) -> None:
        """Ask the controller of a chain, on whichever machine it is, to end it.

        Raises:
            CloudError: AWS refused or cannot be reached.
        """
        uri = f"{self.uri_of(chain)}/{STOP_FILE}"
        with aws_errors(f"write {uri}"):
            put_object(self.s3, uri, b"")
