"""Rules for calls of S3 and other AWS services from within the container."""

from __future__ import annotations

from cloudtrain.failure_rules.classes import FailureClass
from cloudtrain.failure_rules.rules.actions import ALLOW_BUCKET
from cloudtrain.failure_rules.rules.base import Rule, Source, make_rule

RULES: tuple[Rule, ...] = (
    # botocore.exceptions.ClientError
    make_rule(
        FailureClass.S3_ACCESS,
        Source.EXCEPTION | Source.LINE,
        r"An error occurred \((?P<code>AccessDenied|40[34]|NoSuchBucket|NoSuchKey|Forbidden|SignatureDoesNotMatch"
        r"|ExpiredToken|InvalidAccessKeyId|AllAccessDisabled|PermanentRedirect|SlowDown)\) when calling the "
        r"(?P<operation>\w*(?:Object|Bucket|Upload|Part|Copy)\w*) operation",
        ALLOW_BUCKET,
        needles=("An error occurred (",),
    ),
    make_rule(
        FailureClass.IAM,
        Source.EXCEPTION | Source.LINE,
        r"An error occurred \((?:AccessDenied\w*|UnauthorizedOperation|UnrecognizedClientException"
        r"|InvalidClientTokenId)\) when calling the (?P<operation>\w+) operation",
        "Allow the role [role] to call {operation}, or remove the call from the job.",
        needles=("An error occurred (",),
    ),
    # s3fs and s3-connector-for-pytorch have exceptions of their own.
    make_rule(
        FailureClass.S3_ACCESS,
        Source.EXCEPTION,
        r"S3Exception|PermissionError: (?:Access Denied|Forbidden)|s3://\S+.*(?:Access ?Denied|403|NoSuch)",
        ALLOW_BUCKET,
    ),
    make_rule(
        FailureClass.IAM,
        Source.EXCEPTION | Source.LINE,
        r"the secret (?P<secret>\S+) (?:may not be read|cannot be decrypted|cannot be read: there are no credentials"
        r"|cannot be read: AWS does not accept)",
        "Allow the role [role] to read it: secretsmanager:GetSecretValue on {secret}, and kms:Decrypt on its key if it "
        "has a key of its own (`secrets` and `read_only_keys` of infra/); cloudtrain check JOB tests it.",
        needles=("the secret ",),
    ),
    make_rule(
        FailureClass.IAM,
        Source.EXCEPTION | Source.LINE,
        r"the secret (?P<secret>\S+) cannot be read: Secrets Manager does not answer",
        "Give the subnets of [cluster.network.subnets] an interface endpoint for Secrets Manager (`secrets` of infra/ "
        "creates one) or internet access.",
        needles=("the secret ",),
    ),
    make_rule(
        FailureClass.USER_CODE,
        Source.EXCEPTION | Source.LINE,
        r"the secret (?P<secret>\S+) (?:is not there|has no key|is no JSON object|holds |cannot be read)",
        "Fix the reference to {secret} in code.env of the job, or the secret; cloudtrain check JOB tests it.",
        needles=("the secret ",),
    ),
    make_rule(
        FailureClass.IAM,
        Source.EXCEPTION,
        r"NoCredentialsError|Unable to locate credentials|CredentialRetrievalError",
        "Use the credentials of the role, which the container provides (an isolated one has none: "
        "[cluster.network.isolation]); do not set AWS_PROFILE in code.env.",
    ),
    make_rule(
        FailureClass.S3_ACCESS,
        Source.EXCEPTION,
        r"(?:Could not connect to|Connect timeout on|Read timeout on) (?:the )?endpoint URL: \"https?://[^\"]*s3",
        "Give the subnets of [cluster.network.subnets] an S3 gateway endpoint or internet access; "
        "cloudtrain check JOB tests it.",
    ),
)
