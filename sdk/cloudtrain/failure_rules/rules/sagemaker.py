"""Rules for what SageMaker reports: FailureReason and status messages."""

from __future__ import annotations

from cloudtrain.failure_rules.classes import FailureClass
from cloudtrain.failure_rules.rules.base import Rule, Source, here, in_account, in_cloud, on_machine
from cloudtrain.failure_rules.rules.data import ALLOW_BUCKET
from cloudtrain.failure_rules.rules.memory import USE_LESS_HOST_MEMORY
from cloudtrain.failure_rules.rules.storage import FREE_DISK

_OF_THE_MACHINE = here("Read the end of each host's log: this machine ran the job, not SageMaker.")

# Texts of botocore, which SageMaker's reason and this machine's quote when a channel cannot be read.
_SIGN_IN = (
    in_cloud(
        "SageMaker found no credentials for the channel: cloudtrain check JOB tests the role [role]."
    ),
    on_machine(
        "Sign in to AWS on this machine, which reads the channel; cloudtrain doctor shows where credentials come from."
    ),
)

RULES: tuple[Rule, ...] = (
    Rule(
        FailureClass.IAM,
        r"NoCredentialsError|Unable to locate credentials|ExpiredToken|token included in the request is expired"
        r"|(?:SSO|sso)\b.*(?:expired|invalid)|config profile \(\S+\) could not be found",
        _SIGN_IN,
        sources=Source.REASON,
    ),
    # CapacityError: DIAGNijmegen/rse-grand-challenge#2631 shows it; the SDK's session.py tests for it, too.
    Rule(
        FailureClass.CAPACITY,
        r"CapacityError|Insufficient(Instance)?Capacity|Insufficient capacity error from EC2"
        r"|Unable to provision requested ML compute capacity",
        (
            in_account(
                "Submit again later, or name several types in cluster.prefer ([cluster.instance_type] had no capacity); "
                "[cluster.max_pending] limits how long a job waits."
            ),
            _OF_THE_MACHINE,
        ),
        sources=Source.REASON | Source.MESSAGE,
    ),
    # ResourceLimitExceeded: error of CreateTrainingJob in botocore's model; also a FailureReason.
    Rule(
        FailureClass.QUOTA,
        r"ResourceLimitExceeded|account-level service limit|service quota|LimitExceededException",
        (
            in_account(
                "Ask for a higher quota of [cluster.instance_type] (cloudtrain check JOB prints the command), "
                "or lower [cluster.instances]."
            ),
            _OF_THE_MACHINE,
        ),
        sources=Source.REASON | Source.MESSAGE,
    ),
    # aws/sagemaker-python-sdk#35 (unable to assume the role), astronomer/docs#1695 (trust relationship).
    Rule(
        FailureClass.IAM,
        r"assume (the )?role|AssumeRole|PassRole|trust (relationship|policy)|kms:\w+|KMS.*(denied|not authorized)",
        (
            in_account(
                "Fix the role [role]: cloudtrain check JOB lists missing permissions and trust, and how to grant them."
            ),
            _OF_THE_MACHINE,
        ),
        sources=Source.REASON,
    ),
    # aws/sagemaker-python-sdk#57 and #1968 (Cannot pull algorithm container); manifest unknown:
    # aws-samples/amazon-sagemaker-tensorflow-object-detection-api#14; CannotStartContainerError: SageMaker's docs
    Rule(
        FailureClass.IMAGE_PULL,
        r"CannotStartContainerError|CannotPullContainer|[Cc]annot pull algorithm container|manifest (for .* not found"
        r"|unknown)|Requested image .*not found|ensure that the (training )?image .*exists"
        r"|[Cc]annot find the requested image|executable file not found in \$PATH|exec format error",
        (
            in_account(
                "Fix [cluster.image]: it must exist in this region's ECR, the role must be allowed to pull it, "
                "and it needs bash and python for linux/amd64."
            ),
            _OF_THE_MACHINE,
        ),
        sources=Source.REASON,
    ),
    # ClientError, of a container that was ended for lack of memory (SageMaker's docs on FailureReason)
    Rule(
        FailureClass.HOST_MEMORY,
        r"use an instance type with more memory",
        USE_LESS_HOST_MEMORY,
        sources=Source.REASON,
    ),
    # The disk is full while SageMaker downloads the channels. Wording from support threads.
    Rule(
        FailureClass.DISK_FULL,
        r"[Nn]o space left on device|[Ii]nsufficient disk space|disk is full",
        FREE_DISK,
        sources=Source.REASON,
    ),
    # ClientError: Data download failed:... repost.aws/knowledge-center/sagemaker-s3-accessdenied-training
    Rule(
        FailureClass.S3_ACCESS,
        r"(?s)(AccessDenied|Access [Dd]enied|Forbidden|\(403\)|status code: 40[34]|\(404\)|NoSuchBucket|NoSuchKey"
        r"|not authorized to perform: s3:)",
        ALLOW_BUCKET,
        sources=Source.REASON,
    ),
    # ClientError: Data download failed:S3 key: ... matched no files on s3
    Rule(
        FailureClass.DATA,
        r"matched no files|nothing lies at|there is nothing at|no objects at|Data download failed"
        r"|No S3 objects found|manifest file",
        (
            in_account(
                "Fix the address of the channel in data: it holds no usable objects (cloudtrain check JOB lists them)."
            ),
            _OF_THE_MACHINE,
        ),
        sources=Source.REASON,
    ),
    # InternalServerError: We encountered an internal error. Please try again. (SageMaker's docs on FailureReason)
    Rule(
        FailureClass.SERVICE,
        r"InternalServerError|[Ii]nternal (server |service )?error|instance (was|became) unhealthy|HostAgent",
        (
            in_account(
                "Submit again with checkpoint.resume: {run}; if it fails twice, open a case with AWS and name the run."
            ),
            _OF_THE_MACHINE,
        ),
        sources=Source.REASON | Source.MESSAGE,
    ),
)
