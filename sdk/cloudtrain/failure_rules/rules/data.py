"""Rules for data: calls of S3 and other AWS services, and missing, damaged or unreachable data."""

from __future__ import annotations

from cloudtrain.failure_rules.classes import FailureClass
from cloudtrain.failure_rules.rules.base import (
    Part,
    Places,
    Rule,
    Source,
    for_program,
    for_task,
    here,
    in_account,
    in_cloud,
    on_machine,
)
from cloudtrain_runtime.contract.aws_codes import (
    DENIED,
    MISSING_BUCKET,
    MISSING_OBJECT,
    NOT_ACCEPTED,
    THROTTLED,
    any_of,
)

ALLOW_BUCKET = (
    in_account("Allow the role [role] this operation on the bucket,"),
    here("Allow the credentials of this machine this operation on the bucket,"),
    in_account("or fix the URI in data or checkpoint.uri;"),
    here("or fix the URI."),
    in_account("cloudtrain check JOB lists missing permissions."),
)
_ALLOW_CALL = (
    in_account("Allow the role [role] to call {operation},"),
    here("Allow the credentials of this machine to call {operation},"),
    "or remove the call from the job.",
)
_ALLOW_KEY = (
    "What was asked for is encrypted, and its key is the cause.",
    in_account("Allow the role [role] {call}"),
    here("Allow the credentials of this machine {call}"),
    "on {key}, in its own policies or in that of the key.",
)
_ALLOW_SECRET = (
    in_account("Allow the role [role] to read it:"),
    here("Allow the credentials of this machine to read it:"),
    "secretsmanager:GetSecretValue on {secret}, and kms:Decrypt on its key if it has a key of its own",
    in_account("(`secrets` and `read_only_keys` of infra/); cloudtrain check JOB tests it."),
    here("(cloudtrain doctor shows where the credentials come from)."),
)
_REACH_SECRETS = (
    in_cloud(
        "Give the subnets of [cluster.network.subnets] an interface endpoint for Secrets Manager (`secrets` of infra/ "
        "creates one) or internet access."
    ),
    on_machine("Connect this machine to Secrets Manager, and submit again."),
)
_FIX_SECRET = (
    "Fix the reference to {secret} in code.env of the job, or the secret",
    in_account("(cloudtrain check JOB tests it)."),
    here("itself."),
)
_GET_CREDENTIALS = (
    in_account("Use the credentials of the role, which the container provides"),
    in_cloud("(an isolated one has none: [cluster.network.isolation]);"),
    Part("(those of the sandbox);", places=Places.SIMULATION),
    in_account("do not set AWS_PROFILE in code.env."),
    here("Sign in to AWS on this machine; cloudtrain doctor shows where credentials come from."),
)
_REACH_S3 = (
    in_cloud(
        "Give the subnets of [cluster.network.subnets] an S3 gateway endpoint or internet access; "
        "cloudtrain check JOB tests it."
    ),
    on_machine("This machine cannot reach S3: connect it, or name local data in the job."),
)
_FILL_SPLIT = (
    for_task("Check what the channel holds: datasets() returned an empty {split} dataset"),
    for_program("Check what the channel holds: the {split} dataset is empty"),
    in_account("(cloudtrain check JOB lists data)."),
    here("(cloudtrain plan JOB --local names its folder)."),
)
_FIX_FILE = (
    "A file cannot be decoded: find it by {place}, fix it",
    in_account("in S3,"),
    here("in its folder,"),
    "or let the dataset skip such samples.",
)
_FILL_ROOT = (
    "torchvision found no dataset, or other files than it expects, below its root folder:",
    "pass the folder of the channel (SM_CHANNEL_<NAME>) as root,",
    in_account(
        "or download it before the ranks start: download=True needs internet access, and one rank only."
    ),
    here("or download=True on one rank."),
)
_NAME_THE_MODEL = (
    "{path} was taken for a model of the Hub because no such folder is there:",
    (
        "name the folder of a channel (SM_CHANNEL_<NAME>) or of the code; cloudtrain files JOB lists what the bundle "
        "includes."
    ),
)
_MOUNT_AGAIN = (
    in_cloud(
        "The FastFile mount disappeared: submit again, or set mode: File for this channel of data."
    ),
    on_machine(
        "The file system of the data failed: look for its errors (dmesg), and submit again."
    ),
)
_NAME_SERVER = (
    "Nothing listens at {host}:{port}.",
    in_cloud(
        "In a container that is the container itself: give the code the address of a server that the instances reach."
    ),
    on_machine("Start the server there, or give the code another address."),
)
_REACH_ADDRESS = (
    in_cloud(
        "The container cannot reach that address: give [cluster.network.subnets] internet access "
        "(an isolated job has none), or add the files as a channel of data."
    ),
    on_machine(
        "This machine cannot reach that address: connect it, or add the files as a channel of data, which also "
        "works in a cluster without internet access."
    ),
)

_DATA_FILES = (
    "csv|tsv|parquet|jsonl|npy|npz|bin|idx|tfrecord|jpe?g|png|tar|h5|hdf5|arrow|zip|gz|mp4|wav|flac"
)
"""Endings of files that are data rather than code."""
_OF_S3 = r"when calling the (?P<operation>\w*(?:Object|Bucket|Upload|Part|Copy)\w*) operation"
_USE_VALID_CREDENTIALS = (
    "The code uses credentials that are not valid (any more):",
    in_cloud(
        "let it use those of the role, which the container provides and renews, and set no keys in code.env."
    ),
    on_machine("renew those of this machine (aws sts get-caller-identity shows them)."),
)

RULES: tuple[Rule, ...] = (
    # cloudtrain_runtime/process/run_context.py
    Rule(
        FailureClass.DATA,
        r"the job has no channel '(?P<channel>[^']+)'",
        "Add to the job file a line data: {{channel}: FOLDER}, in which FOLDER is a folder of files or an s3:// prefix.",
    ),
    # botocore: what the role lacks is the key of the object, whatever S3's operation.
    Rule(
        FailureClass.IAM,
        r"not authorized to perform: (?P<call>kms:\w+) on (?:resource|the resource): (?P<key>\S+)",
        _ALLOW_KEY,
        needles=("An error occurred (",),
    ),
    # botocore.exceptions.ClientError, by the code: S3's API reference, "Error responses".
    Rule(
        FailureClass.S3_ACCESS,
        rf"An error occurred \({any_of(MISSING_BUCKET | MISSING_OBJECT)}\) {_OF_S3}",
        "S3 has no such object or bucket: print the bucket and the key before the call, and compare them with what is "
        "there (aws s3 ls). Permissions are not the cause.",
        needles=("An error occurred (",),
    ),
    Rule(
        FailureClass.S3_ACCESS,
        rf"An error occurred \(PermanentRedirect\) {_OF_S3}",
        "The bucket is in another region than the client: create the client with region_name of the bucket.",
        needles=("An error occurred (",),
    ),
    Rule(
        FailureClass.S3_ACCESS,
        rf"An error occurred \({any_of(THROTTLED)}\) {_OF_S3}",
        "S3 limits the requests for a prefix: read fewer and larger files, or let the client repeat more often, with "
        "code.env.AWS_MAX_ATTEMPTS set to 10.",
        needles=("An error occurred (",),
    ),
    Rule(
        FailureClass.IAM,
        rf"An error occurred \({any_of(NOT_ACCEPTED)}\) when calling the (?P<operation>\w+) operation",
        _USE_VALID_CREDENTIALS,
        needles=("An error occurred (",),
    ),
    Rule(
        FailureClass.S3_ACCESS,
        rf"An error occurred \({any_of(DENIED)}\) {_OF_S3}",
        ALLOW_BUCKET,
        needles=("An error occurred (",),
    ),
    Rule(
        FailureClass.IAM,
        rf"An error occurred \({any_of(DENIED)}\) when calling the (?P<operation>\w+) operation",
        _ALLOW_CALL,
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
        _ALLOW_SECRET,
        needles=("the secret ",),
    ),
    Rule(
        FailureClass.IAM,
        r"the secret (?P<secret>\S+) cannot be read: Secrets Manager does not answer",
        _REACH_SECRETS,
        needles=("the secret ",),
    ),
    Rule(
        FailureClass.USER_CODE,
        r"the secret (?P<secret>\S+) (?:is not there|has no key|is no JSON object|holds |cannot be read)",
        _FIX_SECRET,
        needles=("the secret ",),
    ),
    Rule(
        FailureClass.IAM,
        r"NoCredentialsError|Unable to locate credentials|CredentialRetrievalError",
        _GET_CREDENTIALS,
    ),
    Rule(
        FailureClass.S3_ACCESS,
        r"(?:Could not connect to|Connect timeout on|Read timeout on) (?:the )?endpoint URL: \"https?://[^\"]*s3",
        _REACH_S3,
    ),
    # cloudtrain_runtime/task.py
    Rule(
        FailureClass.DATA,
        r"the (?P<split>\w+) dataset is empty",
        _FILL_SPLIT,
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
        r"(?:FileNotFoundError|No such file or directory).*['\"](?P<path>(?![/~])[^'\"\s]+\."
        rf"(?:{_DATA_FILES}))['\"]",
        "{path} is not in the folder in which the job runs. Name its folder in the job file (data: with a line "
        "train: FOLDER) and open it below SM_CHANNEL_TRAIN, or include it in the code: cloudtrain files JOB lists its files.",
    ),
    Rule(
        FailureClass.DATA,
        r"(?:FileNotFoundError|NotADirectoryError|No such file or directory).*(?:/input/data/|(?P<path>[^'\"\s]+\."
        rf"(?:json|{_DATA_FILES}))['\"]?)",
        "Check that the channel holds the file under this name: a channel of data is mounted at "
        "/opt/ml/input/data/<channel>, and each instance has only a part of a sharded one.",
    ),
    # torchvision/datasets
    Rule(
        FailureClass.DATA,
        r"Dataset not found or corrupted|Dataset not found\. You can use download=True",
        _FILL_ROOT,
    ),
    # open() without an encoding where the locale is C or POSIX: the file may be right.
    Rule(
        FailureClass.USER_CODE,
        r"Unicode(?:De|En)codeError: 'ascii' codec",
        "Python reads and writes ASCII here, because the locale is C: set code.env.PYTHONUTF8 to 1, or pass "
        "encoding='utf-8' to open at {place}.",
    ),
    # transformers/utils/hub.py: the folder is there, and has not all files of a model.
    Rule(
        FailureClass.DATA,
        r"(?P<folder>/\S+) does not appear to have (?:a file named |files named \(?)(?P<file>\w[\w-]*(?:\.\w+)+)",
        "{folder} lacks {file}, which each model of Transformers has: give the folder that save_pretrained has written, "
        "not one above or below it.",
    ),
    # datasets/packaged_modules, before the traceback, which does not name the file
    Rule(
        FailureClass.DATA,
        r"Failed to read file '(?P<path>[^']+)' with error ",
        "datasets cannot read {path}: fix this file as the message says, or name in data_files only those that are data.",
        needles=("Failed to read file '",),
        sources=Source.LINE,
    ),
    # datasets/table.py
    Rule(
        FailureClass.DATA,
        r"^ValueError: Couldn't cast$|All the data files must have the same columns",
        "The data files have different columns, as the message lists: one of them is no data, such as a file of settings, "
        "or of another split. Name the files in data_files.",
        needles=("All the data files must have the same columns",),
    ),
    # PIL, json, pyarrow, pandas, zipfile, tarfile, zlib, h5py, codecs
    Rule(
        FailureClass.DATA,
        r"UnidentifiedImageError|cannot identify image file|image file is truncated|broken data stream"
        r"|(?<!requests\.exceptions\.)JSONDecodeError|ArrowInvalid|ParserError|EmptyDataError|BadZipFile|ReadError: |zlib\.error"
        r"|UnicodeDecodeError|EOFError: Compressed file ended|Truncated (?:File|Tar)|truncated (?:header|file)"
        r"|Unable to (?:synchronously )?open file|BadGzipFile|DataLossError|[Cc]orrupt(?:ed)? (?:JPEG|image|file|record)",
        _FIX_FILE,
    ),
    # The mount of FastFile mode has disappeared.
    Rule(
        FailureClass.DATA,
        r"Transport endpoint is not connected|Input/output error.*input/data",
        _MOUNT_AGAIN,
    ),
    # huggingface_hub takes the path of a folder that is not there for the name of a repository; transformers/utils/hub.py.
    Rule(
        FailureClass.DATA,
        r"(?:Repo id must [^:]*: '|(?:Incorrect path_or_model_id: '|it looks like )(?=[./~]))(?P<path>[^'\s]+)",
        _NAME_THE_MODEL,
    ),
    # requests and urllib3, of a server that the code looks for where it runs itself
    Rule(
        FailureClass.USER_CODE,
        r"ConnectionPool\(host='(?P<host>localhost|127\.0\.0\.1|0\.0\.0\.0)', port=(?P<port>\d+)\)"
        r".*(?:NewConnectionError|Connection refused)",
        _NAME_SERVER,
    ),
    # huggingface_hub, requests and urllib in a container without internet access.
    Rule(
        FailureClass.DATA,
        r"Temporary failure in name resolution|Name or service not known|LocalEntryNotFoundError|nodename nor servname"
        r"|Error downloading \S+|urlopen error |getaddrinfo failed|Max retries exceeded|OfflineModeIsEnabled"
        r"|NewConnectionError|Network is unreachable|couldn't connect to 'https://huggingface\.co'"
        # datasets/load.py
        r"|^ConnectionError: Couldn't reach ",
        _REACH_ADDRESS,
    ),
    Rule(
        FailureClass.DATA,
        r"GatedRepoError|RepositoryNotFoundError|401 Client Error.*huggingface",
        "Give the job a token for this repository (not in the job file: from Secrets Manager), "
        "or add the files as a channel of data.",
    ),
)
