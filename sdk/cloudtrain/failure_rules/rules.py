"""What failures say: patterns as data, each with its class, the places where it may stand, and what to do.

The first rule that matches decides, so the special ones stand before the general ones. A comment tells where a text was
seen. In an action `[train.batch_size]` shows the field with the job's own value, `{name}` what the pattern has found.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

from cloudtrain.failure_rules.classes import FailureClass as C


class Place(enum.Flag):
    """Where a text may stand."""

    REASON = enum.auto()
    """SageMaker's FailureReason. It decides: no log line knows better."""
    MESSAGE = enum.auto()
    """The message of a secondary status, while the job waits."""
    EXCEPTION = enum.auto()
    """`Type: message` below a traceback."""
    LINE = enum.auto()
    """A log line of its own."""


class Weight(enum.IntEnum):
    """How near to the cause a text is. The lightest wins, however early another one was printed."""

    CAUSE = 0
    SYMPTOM = 1
    """Often the only trace of a cause, and often the effect of one that another rank tells."""
    ECHO = 2
    """What a healthy rank says when another one has gone."""


@dataclass(frozen=True)
class Rule:
    """One text that tells something.

    Attributes:
        needles: Each line that the pattern can match has one of these texts; they are looked for first, because that is
            a hundred times faster.
    """

    failure: C
    pattern: re.Pattern[str]
    places: Place
    action: str
    weight: Weight = Weight.CAUSE
    needles: tuple[str, ...] = ()


def first_match(text: str, place: Place) -> tuple[Rule, re.Match[str]] | None:
    """Return the first rule that a text of this place matches."""
    for rule in _BY_PLACE[place]:
        if (match := rule.pattern.search(text)) is not None:
            return rule, match
    return None


def _rule(
    failure: C,
    places: Place,
    pattern: str,
    action: str,
    weight: Weight = Weight.CAUSE,
    *,
    needles: tuple[str, ...] = (),
) -> Rule:
    return Rule(failure, re.compile(pattern), places, action, weight, needles)


_SAGEMAKER = Place.REASON
_RAISED = Place.EXCEPTION
_PRINTED = Place.LINE
_ANY = Place.EXCEPTION | Place.LINE

_SMALLER_BATCH = (
    "Halve [train.batch_size] and double [train.accumulate] (the global batch stays the same), "
    "or set [train.precision] to bf16."
)
_MORE_HOST_MEMORY = (
    "Use fewer DataLoader workers or a leaner dataset, or a [cluster.instance_type] with more memory; "
    "memory that grows from step to step is a leak."
)
_SHARED_MEMORY = (
    "Lower num_workers or prefetch_factor of the DataLoader, "
    'or call torch.multiprocessing.set_sharing_strategy("file_system"): /dev/shm is full.'
)
_NATIVE_CRASH = (
    "A native library crashed: set code.env.PYTHONFAULTHANDLER to 1 to get the Python line, "
    "and compare the versions in [code.requirements] with the container's."
)
_ROLE = "Mend the role [role]; cloudtrain check JOB tells which permission or trust is missing, and how to give it."
_WAY = (
    "Let the instances reach each other: all traffic between members of [cluster.network.security_groups] "
    "(cloudtrain check JOB looks at it)."
)
_VOLUME = (
    "Raise [cluster.volume] (types with NVMe have their own size), or keep fewer checkpoints: [checkpoint.keep]; "
    "write only below /opt/ml."
)
_BLOCKING = "Run it once with code.env.CUDA_LAUNCH_BLOCKING set to 1: then the traceback shows the line that failed."
_PACKAGE = (
    "Mend the line in [code.requirements]: the container's Python is older or newer than yours, "
    "or the package has no such version."
)
_INTERNET = (
    "The container has no way to that address: give [cluster.network.subnets] a way out "
    "(isolation has none), or bring the files as a channel of data."
)
_BUCKET = (
    "Let the role [role] do this on the bucket, or mend the address in data or checkpoint.uri; "
    "cloudtrain check JOB tells which permission is missing."
)
_BROKEN_GPU = "The hardware is broken: submit again with checkpoint.resume: {run}; another instance will be given."
_PEER = "The rank or host that went first has left no trace: look at the end of each host's log, and submit again."

RULES: tuple[Rule, ...] = (
    # ------------------------------------------------------------ SageMaker's own words
    # CapacityError: seen in DIAGNijmegen/rse-grand-challenge#2631; the SDK's session.py tests for the same word
    _rule(
        C.CAPACITY,
        Place.REASON | Place.MESSAGE,
        r"CapacityError|Insufficient(Instance)?Capacity|Insufficient capacity error from EC2"
        r"|Unable to provision requested ML compute capacity",
        "Submit again later, or name several types in cluster.prefer ([cluster.instance_type] had no capacity); "
        "[cluster.max_pending] tells how long a job may wait.",
    ),
    # ResourceLimitExceeded: error of CreateTrainingJob in botocore's model, also seen as FailureReason
    _rule(
        C.QUOTA,
        Place.REASON | Place.MESSAGE,
        r"ResourceLimitExceeded|account-level service limit|service quota|LimitExceededException",
        "Ask for a higher quota of [cluster.instance_type] (cloudtrain check JOB prints the command), "
        "or lower [cluster.instances].",
    ),
    # aws/sagemaker-python-sdk#35 (unable to assume the role), astronomer/docs#1695 (sts:AssumeRole, trust relationship)
    _rule(
        C.IAM,
        _SAGEMAKER,
        r"assume (the )?role|AssumeRole|PassRole|trust (relationship|policy)|kms:\w+|KMS.*(denied|not authorized)",
        _ROLE,
    ),
    # aws/sagemaker-python-sdk#57 and #1968 (Cannot pull algorithm container); manifest unknown:
    # aws-samples/amazon-sagemaker-tensorflow-object-detection-api#14; CannotStartContainerError: SageMaker's docs
    _rule(
        C.IMAGE_PULL,
        _SAGEMAKER,
        r"CannotStartContainerError|CannotPullContainer|[Cc]annot pull algorithm container|manifest (for .* not found"
        r"|unknown)|Requested image .*not found|ensure that the (training )?image .*exists"
        r"|[Cc]annot find the requested image|executable file not found in \$PATH|exec format error",
        "Mend [cluster.image]: it must exist in this region's ECR, the role must be allowed to pull it, "
        "and it needs bash and python for linux/amd64.",
    ),
    # a full disk while the channels are downloaded; wording of the storage agent, from support threads
    _rule(C.DISK_FULL, _SAGEMAKER, r"[Nn]o space left on device|[Ii]nsufficient disk space|disk is full", _VOLUME),
    # ClientError: Data download failed:... repost.aws/knowledge-center/sagemaker-s3-accessdenied-training
    _rule(
        C.S3_ACCESS,
        _SAGEMAKER,
        r"(?s)(AccessDenied|Access [Dd]enied|Forbidden|\(403\)|status code: 40[34]|\(404\)|NoSuchBucket|NoSuchKey"
        r"|not authorized to perform: s3:)",
        _BUCKET,
    ),
    # ClientError: Data download failed:S3 key: ... matched no files on s3
    _rule(
        C.DATA,
        _SAGEMAKER,
        r"matched no files|nothing lies at|Data download failed|No S3 objects found|manifest file",
        "Mend the address of the channel in data: nothing usable lies there (cloudtrain check JOB lists it).",
    ),
    # InternalServerError: We encountered an internal error. Please try again. (SageMaker's docs on FailureReason)
    _rule(
        C.SERVICE,
        Place.REASON | Place.MESSAGE,
        r"InternalServerError|[Ii]nternal (server |service )?error|instance (was|became) unhealthy|HostAgent",
        "Submit again with checkpoint.resume: {run}; if it happens twice, open a case with AWS and name the run.",
    ),
    # ------------------------------------------------------------ memory of the GPU
    # torch 2.5: GPU 0 has a total capacity of ...; torch <= 2.0: (GPU 0; 6.00 GiB total capacity; ...)
    # pytorch/pytorch#16417 shows both; 2.13 keeps the former
    _rule(
        C.OUT_OF_MEMORY,
        _ANY,
        r"(?:^|: )(?:CUDA|HIP) out of memory\. Tried to allocate (?P<size>[\d.]+ [KMGT]?i?B)",
        _SMALLER_BATCH,
        needles=("out of memory",),
    ),
    # cudaErrorMemoryAllocation from a kernel or from NCCL's own buffers (NVIDIA/nccl issues: Cuda failure)
    _rule(
        C.OUT_OF_MEMORY,
        _ANY,
        r"CUDA error: out of memory|Cuda failure (?:\d+ )?'out of memory'|CUDA_ERROR_OUT_OF_MEMORY",
        _SMALLER_BATCH,
        needles=("out of memory",),
    ),
    # cuBLAS and cuDNN make their workspaces at the first call; without memory they say this (pytorch forums)
    _rule(
        C.OUT_OF_MEMORY,
        _RAISED,
        r"OutOfMemoryError: |CUBLAS_STATUS_(ALLOC_FAILED|NOT_INITIALIZED)|CUDNN_STATUS_(ALLOC_FAILED|NOT_INITIALIZED)",
        _SMALLER_BATCH,
    ),
    # ------------------------------------------------------------ shared memory, memory of the host
    # torch/utils/data/_utils/signal_handling.py and DataLoader.cpp; open-mmlab/mmsegmentation#1356
    _rule(
        C.HOST_MEMORY,
        _ANY,
        r"insufficient shared memory \(shm\)|killed by signal: Bus error",
        _SHARED_MEMORY,
        needles=("insufficient shared memory", "Bus error"),
    ),
    # torchrun's report and our runtime's words for SIGBUS
    _rule(
        C.HOST_MEMORY,
        _PRINTED,
        r"Signal 7 \(SIGBUS\) received by PID|was killed by SIGBUS|failed \(exitcode: -7\)",
        _SHARED_MEMORY,
        needles=("SIGBUS", "exitcode: -7"),
    ),
    _rule(
        C.HOST_MEMORY,
        _RAISED,
        r"No space left on device.*/(?:dev/shm|torch_)|unable to (?:open|mmap|allocate) shared memory",
        _SHARED_MEMORY,
    ),
    # pytorch: c10/core/impl/alloc_cpu.cpp; Python's own MemoryError and numpy's _ArrayMemoryError; ENOMEM of fork
    _rule(
        C.HOST_MEMORY,
        _RAISED,
        r"^(?:[\w.]*\.)?_?(?:Array)?MemoryError|DefaultCPUAllocator: |Cannot allocate memory|killed by signal: Killed",
        _MORE_HOST_MEMORY,
    ),
    # the kernel's words, where a container shows them
    _rule(
        C.HOST_MEMORY,
        _PRINTED,
        r"[Oo]ut of memory: Kill(?:ed)? process|oom-kill:|oom_reaper|Memory cgroup out of memory",
        _MORE_HOST_MEMORY,
        needles=("oom", "ut of memory"),
    ),
    # our runtime: rank 3 on algo-2 (local rank 1) was killed by SIGKILL
    _rule(
        C.HOST_MEMORY,
        _PRINTED,
        # torchrun: failed (exitcode: -9) local_rank: 5 (pid: 2630); hpcaitech/ColossalAI#3514
        r"(?:was killed by|ended with) SIGKILL|Signal 9 \(SIGKILL\) received by PID|failed \(exitcode: -9\)",
        _MORE_HOST_MEMORY,
        needles=("SIGKILL", "exitcode: -9"),
    ),
    # a shell: train.sh: line 3:    27 Killed                  python train.py
    _rule(
        C.HOST_MEMORY,
        _PRINTED,
        r"^(?:\S+: line \d+:)?\s+\d+ Killed\s|^Killed$",
        _MORE_HOST_MEMORY,
        needles=("Killed",),
    ),
    # docker and AWS's toolkit: 128 + 9
    _rule(
        C.HOST_MEMORY,
        _PRINTED,
        r"(?:[Ee]xit ?[Cc]ode:?|exited with code|return code:?) 137\b",
        _MORE_HOST_MEMORY,
        needles=(" 137",),
    ),
    # torch/csrc/DataLoader.cpp: the worker has ended its process, with what no exception could be passed on for
    _rule(
        C.USER_CODE,
        _ANY,
        r"DataLoader worker \(pid \d+\) exited unexpectedly with exit code (?P<code>\d+)",
        "A worker of the DataLoader has ended its process with exit code {code}, and why is lost with it: "
        "num_workers=0 shows it, here with cloudtrain submit JOB --local.",
        needles=("exited unexpectedly with exit code",),
    ),
    # torch/utils/data/dataloader.py: what the rank says when a worker of its own has gone without a word
    _rule(
        C.HOST_MEMORY,
        _RAISED,
        r"DataLoader worker \(pid(?:\(s\))? [\d, ]+\) exited unexpectedly",
        _MORE_HOST_MEMORY,
        Weight.SYMPTOM,
    ),
    # ------------------------------------------------------------ disk
    # errno 28 by Python, tar, pip and torch's writer (PytorchStreamWriter failed writing file ... No space left)
    _rule(C.DISK_FULL, _RAISED, r"No space left on device|Errno 28|Disk quota exceeded|ENOSPC", _VOLUME),
    _rule(
        C.DISK_FULL,
        _PRINTED,
        r"^(?:ERROR: |tar: |cp: |\w+: ).*No space left on device|^OSError: \[Errno 28\]",
        _VOLUME,
        needles=("No space left on device",),
    ),
    # ------------------------------------------------------------ the checkpoint
    # cloudtrain_runtime/checkpoint/script_api.py
    _rule(
        C.CHECKPOINT,
        _ANY,
        r"checkpoint\.resume: there is no complete checkpoint at (?P<uri>\S+)",
        "Mend [checkpoint.resume]: nothing complete lies at {uri}; "
        "the run's folder or prefix must hold step-*/manifest.json.",
        needles=("checkpoint.resume",),
    ),
    _rule(
        C.CHECKPOINT,
        _ANY,
        r"the checkpoint (?P<uri>\S+) does not fit this model",
        "Resume with the model that wrote {uri}, or start anew: checkpoint.resume: never.",
        needles=("does not fit this model",),
    ),
    # cloudtrain_runtime/checkpoint/shards.py
    _rule(
        C.CHECKPOINT,
        _ANY,
        r"the checkpoint (?P<uri>\S+) cannot be read: .*"
        r"\(saved with PyTorch (?P<saved>[^\s,]+), read with PyTorch (?P<own>[^\s)]+)\)",
        "{uri} was saved with PyTorch {saved}, and this image has {own}: resume with PyTorch {saved} "
        "(cluster.framework or [cluster.image]), or with a newer cloudtrain. The checkpoint is not damaged.",
        needles=("saved with PyTorch",),
    ),
    _rule(
        C.CHECKPOINT,
        _ANY,
        r"a checkpoint saved with PyTorch (?P<own>\S+) could not be loaded again",
        "Use an older PyTorch than {own} (cluster.framework or [cluster.image]), or a newer cloudtrain.",
        needles=("could not be loaded again",),
    ),
    # torch.nn.Module.load_state_dict; torch.distributed.checkpoint; a zip cut short (PytorchStreamReader)
    _rule(
        C.CHECKPOINT,
        _RAISED,
        r"Error\(s\) in loading state_dict|CheckpointException|CheckpointError|PytorchStreamReader failed"
        r"|Weights only load failed|invalid load key|Missing key in checkpoint state_dict",
        "The checkpoint is damaged or of another model: resume from an older step of [checkpoint.uri], "
        "or start anew with checkpoint.resume: never.",
    ),
    # ------------------------------------------------------------ packages
    # pip 24: both lines come together, the first with the versions that there are
    _rule(
        C.DEPENDENCY_INSTALL,
        _PRINTED,
        r"^ERROR: (?:Could not find a version that satisfies the requirement (?P<package>\S+)"
        r"|No matching distribution found for (?P<missing>\S+)|Could not install packages"
        r"|Cannot install .* because these package versions have conflicting|ResolutionImpossible"
        r"|Failed (?:building wheel|to build)|Could not build wheels|Could not open requirements file"
        r"|Invalid requirement|THESE PACKAGES DO NOT MATCH THE HASHES)",
        _PACKAGE,
        needles=("ERROR: ",),
    ),
    _rule(
        C.DEPENDENCY_INSTALL,
        _PRINTED,
        r"^(?:error: subprocess-exited-with-error|pip could not install )",
        _PACKAGE,
        Weight.SYMPTOM,
        needles=("subprocess-exited-with-error", "pip could not install"),
    ),
    # AWS's toolkit: InstallRequirementsError (sagemaker_training/errors.py)
    _rule(C.DEPENDENCY_INSTALL, _ANY, r"Install(?:Requirements|Module)Error", _PACKAGE, needles=("Install",)),
    _rule(
        C.DEPENDENCY_INSTALL,
        _RAISED,
        r"ModuleNotFoundError: No module named '(?P<module>[^'.]+)",
        "Add {module} to [code.requirements]; if it is a file of your own, does it travel? cloudtrain files JOB.",
    ),
    _rule(
        C.DEPENDENCY_INSTALL,
        _RAISED,
        r"^ImportError: .*(?:cannot open shared object file|undefined symbol|version `|incompatible)"
        r"|^(?:[\w.]*)PackageNotFoundError|VersionConflict",
        "Pin versions that fit the container's PyTorch in [code.requirements]: one there was built for another.",
    ),
    # ------------------------------------------------------------ S3 and IAM from within the container
    # botocore.exceptions.ClientError
    _rule(
        C.S3_ACCESS,
        _ANY,
        r"An error occurred \((?P<code>AccessDenied|40[34]|NoSuchBucket|NoSuchKey|Forbidden|SignatureDoesNotMatch"
        r"|ExpiredToken|InvalidAccessKeyId|AllAccessDisabled|PermanentRedirect|SlowDown)\) when calling the "
        r"(?P<operation>\w*(?:Object|Bucket|Upload|Part|Copy)\w*) operation",
        _BUCKET,
        needles=("An error occurred (",),
    ),
    _rule(
        C.IAM,
        _ANY,
        r"An error occurred \((?:AccessDenied\w*|UnauthorizedOperation|UnrecognizedClientException"
        r"|InvalidClientTokenId)\) when calling the (?P<operation>\w+) operation",
        "Let the role [role] call {operation}, or take the call out of the job.",
        needles=("An error occurred (",),
    ),
    # s3fs and s3-connector-for-pytorch say it in their own words
    _rule(
        C.S3_ACCESS,
        _RAISED,
        r"S3Exception|PermissionError: (?:Access Denied|Forbidden)|s3://\S+.*(?:Access ?Denied|403|NoSuch)",
        _BUCKET,
    ),
    _rule(
        C.IAM,
        _ANY,
        r"the secret (?P<secret>\S+) (?:may not be read|cannot be decrypted|cannot be read: there are no credentials"
        r"|cannot be read: AWS does not accept)",
        "Let the role [role] read it: secretsmanager:GetSecretValue on {secret}, and kms:Decrypt on its key where it "
        "has one of its own (`secrets` and `read_only_keys` of infra/); cloudtrain check JOB looks at it.",
        needles=("the secret ",),
    ),
    _rule(
        C.IAM,
        _ANY,
        r"the secret (?P<secret>\S+) cannot be read: Secrets Manager does not answer",
        "Give the subnets of [cluster.network.subnets] an interface endpoint for Secrets Manager (`secrets` of infra/ "
        "makes one) or a way out.",
        needles=("the secret ",),
    ),
    _rule(
        C.USER_CODE,
        _ANY,
        r"the secret (?P<secret>\S+) (?:is not there|has no key|is no JSON object|holds |cannot be read)",
        "Mend the reference to {secret} in code.env of the job, or the secret; cloudtrain check JOB looks for it.",
        needles=("the secret ",),
    ),
    _rule(
        C.IAM,
        _RAISED,
        r"NoCredentialsError|Unable to locate credentials|CredentialRetrievalError",
        "Use the role's credentials as the container has them (an isolated one has none: "
        "[cluster.network.isolation]); do not set AWS_PROFILE in code.env.",
    ),
    _rule(
        C.S3_ACCESS,
        _RAISED,
        r"(?:Could not connect to|Connect timeout on|Read timeout on) (?:the )?endpoint URL: \"https?://[^\"]*s3",
        "Give the subnets of [cluster.network.subnets] an S3 gateway endpoint or a way out; "
        "cloudtrain check JOB looks at it.",
    ),
    # ------------------------------------------------------------ data
    # cloudtrain_runtime/task.py
    _rule(
        C.DATA,
        _ANY,
        r"the (?P<split>\w+) dataset is empty",
        "Look what the channel holds: datasets() made an empty {split} dataset (cloudtrain check JOB lists data).",
        needles=("dataset is empty",),
    ),
    # torch.utils.data.RandomSampler of an empty dataset
    _rule(
        C.DATA,
        _RAISED,
        r"num_samples should be a positive integer value|Found 0 files in|[Ff]ound no (?:valid )?(?:files|images)",
        "Look what the channel holds: the dataset is empty; with sharded: true each instance needs a file of its own.",
    ),
    _rule(
        C.DATA,
        _RAISED,
        r"(?:KeyError: '|Key)SM_CHANNEL_(?P<channel>\w+)",
        "Add the channel to data of the job file: SM_CHANNEL_{channel} is set for channels of the job only.",
    ),
    _rule(
        C.DATA,
        _RAISED,
        r"(?:FileNotFoundError|NotADirectoryError|No such file or directory).*(?:/input/data/|(?P<path>[^'\"\s]+\."
        r"(?:csv|tsv|parquet|jsonl?|npy|npz|bin|idx|tfrecord|jpe?g|png|tar|h5|hdf5|arrow|zip|gz|mp4|wav|flac))['\"]?)",
        "Look whether the file lies in the channel, and under this name: a channel of data is "
        "/opt/ml/input/data/<channel>, and each instance of a sharded one has a part only.",
    ),
    # PIL, json, pyarrow, pandas, zipfile, tarfile, zlib, h5py, codecs
    _rule(
        C.DATA,
        _RAISED,
        r"UnidentifiedImageError|cannot identify image file|image file is truncated|broken data stream"
        r"|JSONDecodeError|ArrowInvalid|ParserError|EmptyDataError|BadZipFile|ReadError: |zlib\.error"
        r"|UnicodeDecodeError|EOFError: Compressed file ended|Truncated (?:File|Tar)|truncated (?:header|file)"
        r"|Unable to (?:synchronously )?open file|BadGzipFile|DataLossError|corrupt",
        "One sample is damaged: find the file that the traceback names, mend it in S3, "
        "or let the dataset skip what cannot be read.",
    ),
    # mountpoint of FastFile that has gone
    _rule(
        C.DATA,
        _RAISED,
        r"Transport endpoint is not connected|Input/output error.*input/data",
        "The FastFile mount has gone: submit again, or take mode: File for this channel of data.",
    ),
    # huggingface_hub, requests, urllib in a container without a way out
    _rule(
        C.DATA,
        _RAISED,
        r"Temporary failure in name resolution|Name or service not known|LocalEntryNotFoundError|nodename nor servname"
        r"|Error downloading \S+|urlopen error |getaddrinfo failed|Max retries exceeded|OfflineModeIsEnabled"
        r"|NewConnectionError|Network is unreachable|couldn't connect to 'https://huggingface\.co'",
        _INTERNET,
    ),
    _rule(
        C.DATA,
        _RAISED,
        r"GatedRepoError|RepositoryNotFoundError|401 Client Error.*huggingface",
        "Give the job a token for this repository (not in the job file: from Secrets Manager), "
        "or bring the files as a channel of data.",
    ),
    # ------------------------------------------------------------ GPUs
    # Xid and ECC errors: NVIDIA's list of Xid; "uncorrectable ECC error encountered" is cudaErrorECCUncorrectable
    _rule(
        C.SERVICE,
        _ANY,
        r"uncorrectable ECC error|[Gg][Pp][Uu] has fallen off the bus|GPU is lost|NVRM: Xid"
        r"|Cuda failure (?:\d+ )?'(?:uncorrectable|hardware)",
        _BROKEN_GPU,
        needles=("uncorrectable", "fallen off the bus", "GPU is lost", "Xid", "Cuda failure"),
    ),
    # NCCL checks for it since 2.18: Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 10
    _rule(
        C.USER_CODE,
        _ANY,
        r"Duplicate GPU detected : rank (?P<first>\d+) and rank (?P<second>\d+)",
        "Call torch.cuda.set_device with LOCAL_RANK before init_process_group: ranks {first} and {second} share a GPU.",
        needles=("Duplicate GPU detected",),
    ),
    _rule(
        C.USER_CODE,
        _RAISED,
        r"device-side assert triggered",
        "An index is out of range on the GPU: mostly a label not below the number of classes, or a token not below the "
        "size of the vocabulary. " + _BLOCKING,
    ),
    # printed by the kernel itself, before any Python line: Indexing.cu:1290: ... Assertion `srcIndex < ...` failed
    _rule(
        C.USER_CODE,
        _PRINTED,
        r"\.cu:\d+: .*Assertion .* failed",
        "An index is out of range on the GPU: mostly a label not below the number of classes, or a token not below the "
        "size of the vocabulary. " + _BLOCKING,
        needles=("Assertion",),
    ),
    _rule(
        C.USER_CODE,
        _RAISED,
        r"illegal memory access|unspecified launch failure|misaligned address|CUBLAS_STATUS_(?:EXECUTION_FAILED"
        r"|INVALID_VALUE|INTERNAL_ERROR|NOT_SUPPORTED)|CUDNN_STATUS_(?:EXECUTION_FAILED|BAD_PARAM)",
        _BLOCKING,
    ),
    _rule(
        C.IMAGE_PULL,
        _RAISED,
        r"no kernel image is available|Found no NVIDIA driver|No CUDA GPUs are available"
        r"|CUDA driver version is insufficient|PTX was compiled with an unsupported toolchain"
        r"|NVIDIA driver on your system is too old",
        "The container's CUDA does not fit [cluster.instance_type]: choose another cluster.framework "
        "([cluster.image]).",
    ),
    # ------------------------------------------------------------ a collective that nobody finished
    # cloudtrain_runtime/launcher/hang.py, of a host whose ranks only wait, and of the host whose rank stands elsewhere
    _rule(
        C.HANG,
        _PRINTED,
        r"^(?:AlgorithmError: )?hang: no step for .*(?: on \S+|rank \d+|\() ?waits in ",
        "Find out what {missing} did instead: the log of its host, or output/data/hang of it, holds its stack.",
        Weight.SYMPTOM,
        needles=("hang: no step",),
    ),
    _rule(
        C.HANG,
        _PRINTED,
        r"^(?:AlgorithmError: )?hang: no step for .*?; (?P<missing>.*? (?:on \S+?)):? .*?(?P<place>\S+:\d+ in \S+)?$",
        "Find out why {missing} does not come on at {place}; the stacks of all ranks lie in hang/ of output.tar.gz "
        "and beside the checkpoints. If a phase may take so long, raise [limits.hang].",
        needles=("hang: no step",),
    ),
    # hiyouga/LlamaFactory#7396 and pytorch/pytorch#118369, from torch 1.13 to 2.9
    _rule(
        C.HANG,
        _ANY,
        r"Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(?P<number>\d+), OpType=(?P<operation>\w+)"
        r".*?ran for (?P<milliseconds>\d+) milliseconds",
        "Find out what {missing} did instead (its log ends there): a rank that left the loop early, another order of "
        "collectives, or slow work on one rank only, such as saving or evaluating.",
        Weight.SYMPTOM,
        needles=("Watchdog caught collective",),
    ),
    # torch's ProcessGroupGloo::monitoredBarrier
    _rule(
        C.HANG,
        _ANY,
        r"Ranks? (?P<ranks>\d[\d, ]*) failed to pass monitoredBarrier in (?P<milliseconds>\d+) ms",
        "Find out what {missing} did instead: its log ends before the barrier.",
        Weight.SYMPTOM,
        needles=("monitoredBarrier",),
    ),
    # c10d's TCPStore: Timed out after 601 seconds waiting for clients. 15/16 clients joined.
    _rule(
        C.HANG,
        _ANY,
        r"Timed out after \d+ seconds waiting for clients\. (?P<joined>\d+)/(?P<world>\d+) clients joined",
        "{joined} of {world} ranks came to the start: look at the log of the host that is missing; it may still have "
        "been installing packages or downloading.",
        Weight.SYMPTOM,
        needles=("clients joined",),
    ),
    # Gloo: Timed out waiting 1800000ms for recv operation to complete; NCCL: timed out in blocking wait
    _rule(
        C.HANG,
        _RAISED,
        r"Timed out waiting (?P<milliseconds>\d+) ?ms for (?:send|recv) operation|timed out in blocking wait"
        r"|wait timeout after \d+ms",
        "Find out what {missing} did instead: a rank that left the loop early, or slow work on one rank only.",
        Weight.SYMPTOM,
    ),
    # ------------------------------------------------------------ the way between ranks
    # libfabric, prov/efa/src/rdm/efa_rdm_util.c: it prints this line and aborts the process
    _rule(
        C.NCCL,
        _PRINTED,
        r"FI_EFA_USE_DEVICE_RDMA=1 was set.*no rdma-read capability",
        "Remove FI_EFA_USE_DEVICE_RDMA from code.env, the image and the script: libfabric finds out by itself what the "
        "instance's EFA device can do, and aborts where the device cannot do what this variable asks for.",
        needles=("FI_EFA_USE_DEVICE_RDMA",),
    ),
    # aws/aws-ofi-nccl#715 (Couldn't open CQ), #161 (Request completed with error), #156 (a security group it was)
    _rule(
        C.NCCL,
        _PRINTED,
        r"NET/OFI (?:Request .*completed with error|Couldn't open|Creating new endpoint .* failed)"
        r"|aws-ofi-nccl initialization failed|efa.*(?:Unable to create|prov_err)",
        "EFA does not work here: " + _WAY + " code.env.FI_EFA_USE_DEVICE_RDMA: 0 takes RDMA out.",
        Weight.SYMPTOM,
        needles=("NET/OFI", "aws-ofi-nccl", "efa"),
    ),
    # ncclRemoteError: torch's getNcclErrorDetailStr says "a call failed possibly due to a network error or a remote
    # process exiting prematurely"; an aborted communicator is one that torch ended; retrieving ncclUniqueId fails when
    # rank 0 has gone before it wrote it (yifan123/flow_grpo#171)
    _rule(
        C.NCCL,
        _RAISED,
        r"ncclRemoteError|NCCL communicator (?:was|has been) aborted|remote process exiting prematurely"
        r"|retrieving ncclUniqueId from|possible application crash on rank",
        _PEER,
        Weight.ECHO,
    ),
    _rule(
        C.NCCL,
        _RAISED,
        r"nccl(?:UnhandledCudaError|SystemError|InternalError|InvalidUsage|InvalidArgument)|NCCL error"
        r"|DistBackendError",
        "Submit again with code.env.NCCL_DEBUG: INFO; the lines with NCCL WARN above the traceback name the cause. "
        + _WAY,
        Weight.SYMPTOM,
    ),
    # NCCL's own warnings, at the start of a line: algo-1:462:462 [0] init.cc:523 NCCL WARN ...
    _rule(
        C.NCCL,
        _PRINTED,
        r"^\S+:\d+:\d+ \[\d+\] .*NCCL WARN (?!.*(?:[Ff]ailed to find|[Ff]alling back|Could not find|not supported))",
        "Submit again with code.env.NCCL_DEBUG: INFO, and read what NCCL warns of. " + _WAY,
        Weight.SYMPTOM,
        needles=("NCCL WARN",),
    ),
    # c10d's sockets (torch/csrc/distributed/c10d/socket.cpp)
    _rule(
        C.NCCL,
        _ANY,
        r"server socket has failed to listen|EADDRINUSE|[Aa]ddress already in use",
        "Two programs want one port: call init_process_group once and without an address of its own "
        "(MASTER_ADDR and MASTER_PORT are set). A script that computes its own ranks takes "
        "cluster.processes_per_instance: 1.",
        needles=("failed to listen", "EADDRINUSE", "ddress already in use"),
    ),
    _rule(
        C.NCCL,
        _ANY,
        # not what torchrun logs when the first host, which keeps the store, has ended before this one
        r"^(?!.*has failed to (?:shutdown|send a keep-alive)).*(?:client socket has timed out|RendezvousTimeoutError"
        r"|RendezvousConnectionError|rendezvous.*timed? ?out)",
        "The hosts have not found each other: " + _WAY,
        Weight.SYMPTOM,
        needles=("client socket", "Rendezvous", "rendezvous"),
    ),
    # Gloo's tcp/pair.cc and c10d: what is left when a peer has gone
    _rule(
        C.NCCL,
        _RAISED,
        r"Connection (?:closed|reset) by peer|[Cc]onnection was likely closed|Broken pipe|BrokenPipeError"
        r"|ConnectionResetError|Socket closed|DistNetworkError|DistStoreError|Connection refused|failed to recv"
        r"|RendezvousClosedError|recvValue failed",
        _PEER,
        Weight.ECHO,
    ),
    # Gloo's connectFullMesh, when an interface or address is wrong (pytorch/pytorch#135355)
    _rule(
        C.NCCL,
        _RAISED,
        r"gloo/transport|connectFullMesh failed",
        "The ranks cannot connect: do not set GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME in code.env. " + _WAY,
        Weight.SYMPTOM,
    ),
    # ------------------------------------------------------------ torchrun, MPI, AWS's toolkit: reports of others
    _rule(
        C.UNKNOWN,
        _RAISED,
        r"ChildFailedError|SignalException|ExecuteUserScriptError|got signal: 15|SIGTERM|KeyboardInterrupt"
        # a launcher in a launcher (facebookresearch/maskrcnn-benchmark#1329)
        r"|CalledProcessError: .*(?:torchrun|torch\.distributed|accelerate|deepspeed|mpirun|python)|SystemExit",
        _PEER,
        Weight.ECHO,
    ),
    _rule(
        C.UNKNOWN,
        _PRINTED,
        r"(?:was killed by|ended with) SIGTERM|Signal 15 \(SIGTERM\) received by PID",
        _PEER,
        Weight.ECHO,
        needles=("SIGTERM",),
    ),
    # a rank aborted by torch's watchdog, or by a C++ exception that nobody caught
    _rule(
        C.USER_CODE,
        _PRINTED,
        r"(?:was killed by|ended with) SIG(?:SEGV|ILL|FPE)|Signal (?:11|4|8) \(SIG\w+\) received by PID"
        r"|^Fatal Python error: (?!Aborted)",
        _NATIVE_CRASH,
        needles=("SIG", "Fatal Python error"),
    ),
    _rule(
        C.UNKNOWN,
        _PRINTED,
        r"(?:was killed by|ended with) SIGABRT|Signal 6 \(SIGABRT\) received by PID",
        _NATIVE_CRASH,
        Weight.ECHO,
        needles=("SIGABRT",),
    ),
    # ------------------------------------------------------------ the job's own code
    # cloudtrain_runtime/task.py and loop.py, printed by worker.py as `error: ...`; contract/signatures.py, by launch.py
    _rule(
        C.USER_CODE,
        _PRINTED,
        r"^error: (?:.*\.py(?::\d+:\d+)?  |code\.|train\.|\w+\(\) must|the \w+ dataset|loss\(\)|metrics\(\))",
        "Mend what the message names, and try it here first: cloudtrain submit JOB --local.",
        needles=("error: ",),
    ),
    # argparse, which ends with exit code 2 and without a traceback
    _rule(
        C.USER_CODE,
        _PRINTED,
        r"^[\w./-]+\.py: error: (?:unrecognized arguments|the following arguments are required|argument |invalid)",
        "Mend code.args: the script does not take them so.",
        needles=(".py: error: ",),
    ),
    _rule(
        C.USER_CODE,
        _PRINTED,
        r"can't open file '?(?P<path>[^':]+)'?: \[Errno 2\]",
        "Mend code.script, or let {path} travel: cloudtrain files JOB shows what does.",
        needles=("can't open file",),
    ),
    _rule(
        C.USER_CODE,
        _RAISED,
        r"FileNotFoundError: .*'(?P<path>[^']+)'",
        "Let {path} travel (cloudtrain files JOB shows what does), or bring it as a channel of data.",
    ),
    _rule(
        C.USER_CODE,
        _RAISED,
        r"Expected to have finished reduction in the prior iteration|Expected to mark a variable ready only once",
        "Some parameters take no part in the loss: use all outputs, "
        "or wrap the model with find_unused_parameters=True.",
    ),
    # Parameters that FSDP2 has freed: the hook that gathers them again hung on an output that was then written over
    _rule(
        C.USER_CODE,
        _RAISED,
        r"setStorage: .* out of bounds for storage of size 0",
        "With data: fsdp what a module has returned must not be changed in place: "
        "logits = logits / 2 instead of logits /= 2.",
    ),
    _rule(
        C.USER_CODE,
        _RAISED,
        r"Expected all tensors to be on the same device",
        "Move model and batch to context().device (or cuda:LOCAL_RANK) before the step at {place}.",
    ),
    _rule(C.USER_CODE, _RAISED, r"", "Mend {place}, and try it here first: cloudtrain submit JOB --local."),
)
"""In order of precedence."""

_BY_PLACE = {place: tuple(rule for rule in RULES if place in rule.places) for place in Place}


def line_rules() -> tuple[tuple[str, tuple[Rule, ...]], ...]:
    """Return each needle with the rules that have it."""
    found: dict[str, list[Rule]] = {}
    for rule in _BY_PLACE[Place.LINE]:
        for needle in rule.needles:
            found.setdefault(needle, []).append(rule)
    return tuple((needle, tuple(rules)) for needle, rules in found.items())
