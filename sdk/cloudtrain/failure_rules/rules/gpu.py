"""Rules for GPUs: broken hardware, CUDA errors and unsuitable images."""

from __future__ import annotations

from cloudtrain.failure_rules.classes import FailureClass
from cloudtrain.failure_rules.rules.base import Jobs, Part, Places, Rule, Source

_FIND_CUDA_LINE = "Run it once with code.env.CUDA_LAUNCH_BLOCKING set to 1: the traceback then shows the line that failed."
_INDEX_OUT_OF_RANGE = (
    "An index is out of range on the GPU: usually a label not below the number of classes, or a token not below "
    "the size of the vocabulary. " + _FIND_CUDA_LINE
)
_CHANGE_HARDWARE = (
    Part("The hardware is broken:"),
    Part(
        "submit again with checkpoint.resume: {run}, which takes another instance.",
        places=Places.SAGEMAKER,
    ),
    Part(
        "use another GPU (CUDA_VISIBLE_DEVICES) or machine, and submit again with checkpoint.resume: {run}.",
        places=Places.MACHINE,
    ),
)
_ONE_RANK_PER_GPU = (
    Part(
        "Ranks {first} and {second} share a GPU: use at most one rank per GPU (cluster.processes_per_instance).",
        Jobs.TASK,
    ),
    Part(
        "Call torch.cuda.set_device with LOCAL_RANK before init_process_group: ranks {first} and {second} share a GPU.",
        Jobs.PROGRAM,
    ),
)
_FIT_THE_DRIVER = (
    Part(
        "The host's driver is older than the container's CUDA needs: choose an older cluster.framework "
        "([cluster.image]). The event surroundings (cloudtrain logs RUN) has both versions. An image of your own needs "
        "NVIDIA's cuda-compat package in /usr/local/cuda/compat, which the launcher then uses.",
        places=Places.SAGEMAKER,
    ),
    Part(
        "The driver of this machine is older than the CUDA of its PyTorch needs: update the driver, or install a "
        "PyTorch for an older CUDA. The event surroundings (cloudtrain logs RUN) has both versions.",
        places=Places.MACHINE,
    ),
)
_FIT_THE_GPU = (
    Part(
        "The container's CUDA does not fit [cluster.instance_type]: choose another cluster.framework ([cluster.image]).",
        places=Places.SAGEMAKER,
    ),
    Part(
        "The PyTorch of this machine does not fit its GPU: install one that was built for it.",
        places=Places.MACHINE,
    ),
)

RULES: tuple[Rule, ...] = (
    # Xid and ECC errors: NVIDIA's list of Xids; "uncorrectable ECC error encountered" is cudaErrorECCUncorrectable.
    Rule(
        FailureClass.SERVICE,
        r"uncorrectable ECC error|[Gg][Pp][Uu] has fallen off the bus|GPU is lost|NVRM: Xid"
        r"|Cuda failure (?:\d+ )?'(?:uncorrectable|hardware)",
        _CHANGE_HARDWARE,
        needles=("uncorrectable", "fallen off the bus", "GPU is lost", "Xid", "Cuda failure"),
    ),
    # NCCL 2.18 and later: Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 10.
    Rule(
        FailureClass.USER_CODE,
        r"Duplicate GPU detected : rank (?P<first>\d+) and rank (?P<second>\d+)",
        _ONE_RANK_PER_GPU,
        needles=("Duplicate GPU detected",),
    ),
    Rule(
        FailureClass.USER_CODE,
        r"device-side assert triggered",
        _INDEX_OUT_OF_RANGE,
    ),
    # The CUDA kernel prints it before any Python line: Indexing.cu:1290: ... Assertion `srcIndex < ...` failed.
    Rule(
        FailureClass.USER_CODE,
        r"\.cu:\d+: .*Assertion .* failed",
        _INDEX_OUT_OF_RANGE,
        needles=("Assertion",),
        sources=Source.LINE,
    ),
    Rule(
        FailureClass.USER_CODE,
        r"illegal memory access|unspecified launch failure|misaligned address|CUBLAS_STATUS_(?:EXECUTION_FAILED"
        r"|INVALID_VALUE|INTERNAL_ERROR|NOT_SUPPORTED)|CUDNN_STATUS_(?:EXECUTION_FAILED|BAD_PARAM)",
        _FIND_CUDA_LINE,
    ),
    # torch/csrc/cuda and c10/cuda; cudaErrorInsufficientDriver (35), cudaErrorUnsupportedPtxVersion (222),
    # cudaErrorSystemDriverMismatch (803) and cudaErrorCompatNotSupportedOnDevice (804) of CUDA's runtime.
    Rule(
        FailureClass.IMAGE_PULL,
        r"CUDA driver version is insufficient|PTX was compiled with an unsupported toolchain"
        r"|NVIDIA driver on your system is too old|unsupported display driver / cuda driver combination"
        r"|forward compatibility was attempted on non supported HW",
        _FIT_THE_DRIVER,
    ),
    Rule(
        FailureClass.IMAGE_PULL,
        r"no kernel image is available|Found no NVIDIA driver|No CUDA GPUs are available",
        _FIT_THE_GPU,
    ),
)
