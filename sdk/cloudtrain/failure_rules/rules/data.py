"""Rules for missing, damaged or unreachable data."""

from __future__ import annotations

from cloudtrain.failure_rules.classes import FailureClass
from cloudtrain.failure_rules.rules.actions import CONNECT_TO_INTERNET
from cloudtrain.failure_rules.rules.base import Rule, Source, make_rule

RULES: tuple[Rule, ...] = (
    # cloudtrain_runtime/task.py
    make_rule(
        FailureClass.DATA,
        Source.EXCEPTION | Source.LINE,
        r"the (?P<split>\w+) dataset is empty",
        "Check what the channel holds: datasets() returned an empty {split} dataset (cloudtrain check JOB lists data).",
        needles=("dataset is empty",),
    ),
    # torch.utils.data.RandomSampler of an empty dataset.
    make_rule(
        FailureClass.DATA,
        Source.EXCEPTION,
        r"num_samples should be a positive integer value|Found 0 files in|[Ff]ound no (?:valid )?(?:files|images)",
        "Check what the channel holds: the dataset is empty; with sharded: true each instance needs a file of its own.",
    ),
    make_rule(
        FailureClass.DATA,
        Source.EXCEPTION,
        r"(?:KeyError: '|Key)SM_CHANNEL_(?P<channel>\w+)",
        "Add the channel to data of the job file: SM_CHANNEL_{channel} is only set for channels of the job.",
    ),
    make_rule(
        FailureClass.DATA,
        Source.EXCEPTION,
        r"(?:FileNotFoundError|NotADirectoryError|No such file or directory).*(?:/input/data/|(?P<path>[^'\"\s]+\."
        r"(?:csv|tsv|parquet|jsonl?|npy|npz|bin|idx|tfrecord|jpe?g|png|tar|h5|hdf5|arrow|zip|gz|mp4|wav|flac))['\"]?)",
        "Check that the channel holds the file under this name: a channel of data is mounted at "
        "/opt/ml/input/data/<channel>, and each instance has only a part of a sharded one.",
    ),
    # PIL, json, pyarrow, pandas, zipfile, tarfile, zlib, h5py, codecs
    make_rule(
        FailureClass.DATA,
        Source.EXCEPTION,
        r"UnidentifiedImageError|cannot identify image file|image file is truncated|broken data stream"
        r"|JSONDecodeError|ArrowInvalid|ParserError|EmptyDataError|BadZipFile|ReadError: |zlib\.error"
        r"|UnicodeDecodeError|EOFError: Compressed file ended|Truncated (?:File|Tar)|truncated (?:header|file)"
        r"|Unable to (?:synchronously )?open file|BadGzipFile|DataLossError|corrupt",
        "One sample is damaged: find the file that the traceback names, fix it in S3, "
        "or let the dataset skip unreadable samples.",
    ),
    # The mount of FastFile mode has disappeared.
    make_rule(
        FailureClass.DATA,
        Source.EXCEPTION,
        r"Transport endpoint is not connected|Input/output error.*input/data",
        "The FastFile mount disappeared: submit again, or set mode: File for this channel of data.",
    ),
    # huggingface_hub, requests and urllib in a container without internet access.
    make_rule(
        FailureClass.DATA,
        Source.EXCEPTION,
        r"Temporary failure in name resolution|Name or service not known|LocalEntryNotFoundError|nodename nor servname"
        r"|Error downloading \S+|urlopen error |getaddrinfo failed|Max retries exceeded|OfflineModeIsEnabled"
        r"|NewConnectionError|Network is unreachable|couldn't connect to 'https://huggingface\.co'",
        CONNECT_TO_INTERNET,
    ),
    make_rule(
        FailureClass.DATA,
        Source.EXCEPTION,
        r"GatedRepoError|RepositoryNotFoundError|401 Client Error.*huggingface",
        "Give the job a token for this repository (not in the job file: from Secrets Manager), "
        "or add the files as a channel of data.",
    ),
)
