"""Rules for data: calls of S3 and other AWS services, and missing, damaged or unreachable data."""

from __future__ import annotations

from cloudtrain.failure_rules.classes import FailureClass
from cloudtrain.failure_rules.rules.base import Rule

ALLOW_BUCKET = (
    "Allow the role [role] this operation on the bucket, or fix the URI in data or checkpoint.uri; "
    "cloudtrain check JOB lists missing permissions."
)

RULES: tuple[Rule, ...] = (
    # botocore.exceptions.ClientError
    Rule(
        FailureClass.S3_ACCESS,
        r"An error occurred \((?P<code>AccessDenied|40[34]|NoSuchBucket|NoSuchKey|Forbidden|SignatureDoesNotMatch"
        r"|ExpiredToken|InvalidAccessKeyId|AllAccessDisabled|PermanentRedirect|SlowDown)\) when calling the "
        r"(?P<operation>\w*(?:Object|Bucket|Upload|Part|Copy)\w*) operation",
        ALLOW_BUCKET,
        needles=("An error occurred (",),
    ),
    Rule(
        FailureClass.IAM,
        r"An error occurred \((?:AccessDenied\w*|UnauthorizedOperation|UnrecognizedClientException"
        r"|InvalidClientTokenId)\) when calling the (?P<operation>\w+) operation",
        "Allow the role [role] to call {operation}, or remove the call from the job.",
        needles=("An error occurred (",),
    ),
    # s3fs and s3-connector-for-pytorch have exceptions of their own.
    Rule(
        FailureClass.S3_ACCESS,
        r"S3Exception|PermissionError: (?:Access Denied|Forbidden)|s3://\S+.*(?:Access ?Denied|403|NoSuch)",
        ALLOW_BUCKET,
    ),
    Rule(
        FailureClass.IAM,
        r"the secret (?P<secret>\S+) (?:may not be read|cannot be decrypted|cannot be read: there are no credentials"
        r"|cannot be read: AWS does not accept)",
        "Allow the role [role] to read it: secretsmanager:GetSecretValue on {secret}, and kms:Decrypt on its key if it "
        "has a key of its own (`secrets` and `read_only_keys` of infra/); cloudtrain check JOB tests it.",
        needles=("the secret ",),
    ),
    Rule(
        FailureClass.IAM,
        r"the secret (?P<secret>\S+) cannot be read: Secrets Manager does not answer",
        "Give the subnets of [cluster.network.subnets] an interface endpoint for Secrets Manager (`secrets` of infra/ "
        "creates one) or internet access.",
        needles=("the secret ",),
    ),
    Rule(
        FailureClass.USER_CODE,
        r"the secret (?P<secret>\S+) (?:is not there|has no key|is no JSON object|holds |cannot be read)",
        "Fix the reference to {secret} in code.env of the job, or the secret; cloudtrain check JOB tests it.",
        needles=("the secret ",),
    ),
    Rule(
        FailureClass.IAM,
        r"NoCredentialsError|Unable to locate credentials|CredentialRetrievalError",
        "Use the credentials of the role, which the container provides (an isolated one has none: "
        "[cluster.network.isolation]); do not set AWS_PROFILE in code.env.",
    ),
    Rule(
        FailureClass.S3_ACCESS,
        r"(?:Could not connect to|Connect timeout on|Read timeout on) (?:the )?endpoint URL: \"https?://[^\"]*s3",
        "Give the subnets of [cluster.network.subnets] an S3 gateway endpoint or internet access; "
        "cloudtrain check JOB tests it.",
    ),
    # cloudtrain_runtime/task.py
    Rule(
        FailureClass.DATA,
        r"the (?P<split>\w+) dataset is empty",
        "Check what the channel holds: datasets() returned an empty {split} dataset (cloudtrain check JOB lists data).",
        needles=("dataset is empty",),
    ),
    # torch.utils.data.RandomSampler of an empty dataset.
    Rule(
        FailureClass.DATA,
        r"num_samples should be a positive integer value|Found 0 files in|[Ff]ound no (?:valid )?(?:files|images)",
        "Check what the channel holds: the dataset is empty; with sharded: true each instance needs a file of its own.",
    ),
    Rule(
        FailureClass.DATA,
        r"(?:KeyError: '|Key)SM_CHANNEL_(?P<channel>\w+)",
        "Add the channel to data of the job file: SM_CHANNEL_{channel} is only set for channels of the job.",
    ),
    Rule(
        FailureClass.DATA,
        r"(?:FileNotFoundError|NotADirectoryError|No such file or directory).*(?:/input/data/|(?P<path>[^'\"\s]+\."
        r"(?:csv|tsv|parquet|jsonl?|npy|npz|bin|idx|tfrecord|jpe?g|png|tar|h5|hdf5|arrow|zip|gz|mp4|wav|flac))['\"]?)",
        "Check that the channel holds the file under this name: a channel of data is mounted at "
        "/opt/ml/input/data/<channel>, and each instance has only a part of a sharded one.",
    ),
    # PIL, json, pyarrow, pandas, zipfile, tarfile, zlib, h5py, codecs
    Rule(
        FailureClass.DATA,
        r"UnidentifiedImageError|cannot identify image file|image file is truncated|broken data stream"
        r"|JSONDecodeError|ArrowInvalid|ParserError|EmptyDataError|BadZipFile|ReadError: |zlib\.error"
        r"|UnicodeDecodeError|EOFError: Compressed file ended|Truncated (?:File|Tar)|truncated (?:header|file)"
        r"|Unable to (?:synchronously )?open file|BadGzipFile|DataLossError|corrupt",
        "One sample is damaged: find the file that the traceback names, fix it in S3, "
        "or let the dataset skip unreadable samples.",
    ),
    # The mount of FastFile mode has disappeared.
    Rule(
        FailureClass.DATA,
        r"Transport endpoint is not connected|Input/output error.*input/data",
        "The FastFile mount disappeared: submit again, or set mode: File for this channel of data.",
    ),
    # huggingface_hub, requests and urllib in a container without internet access.
    Rule(
        FailureClass.DATA,
        r"Temporary failure in name resolution|Name or service not known|LocalEntryNotFoundError|nodename nor servname"
        r"|Error downloading \S+|urlopen error |getaddrinfo failed|Max retries exceeded|OfflineModeIsEnabled"
        r"|NewConnectionError|Network is unreachable|couldn't connect to 'https://huggingface\.co'",
        "The container cannot reach that address: give [cluster.network.subnets] internet access "
        "(an isolated job has none), or add the files as a channel of data.",
    ),
    Rule(
        FailureClass.DATA,
        r"GatedRepoError|RepositoryNotFoundError|401 Client Error.*huggingface",
        "Give the job a token for this repository (not in the job file: from Secrets Manager), "
        "or add the files as a channel of data.",
    ),
)
