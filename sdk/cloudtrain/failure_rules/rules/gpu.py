"""Rules for GPUs: broken hardware, CUDA errors and unsuitable images."""

from __future__ import annotations

from cloudtrain.failure_rules.classes import FailureClass
from cloudtrain.failure_rules.rules.base import (
    Causality,
    Rule,
    Source,
    for_program,
    for_task,
    in_cloud,
    on_machine,
)

_FIND_CUDA_LINE = "Run it once with code.env.CUDA_LAUNCH_BLOCKING set to 1: the traceback then shows the line that failed."
_INDEX_OUT_OF_RANGE = (
    "An index is out of range on the GPU: usually a label not below the number of classes, or a token not below "
    "the size of the vocabulary. " + _FIND_CUDA_LINE
)
_CHANGE_HARDWARE = (
    "The hardware is broken:",
    in_cloud("submit again with checkpoint.resume: {run}, which takes another instance."),
    on_machine(
        "use another GPU (CUDA_VISIBLE_DEVICES) or machine, and submit again with checkpoint.resume: {run}."
    ),
)
_ONE_RANK_PER_GPU = (
    for_task(
        "Ranks {first} and {second} share a GPU: use at most one rank per GPU (cluster.processes_per_instance)."
    ),
    for_program(
        "Call torch.cuda.set_device with LOCAL_RANK before init_process_group: ranks {first} and {second} share a GPU."
    ),
)
_FIT_THE_DRIVER = (
    in_cloud(
        "The host's driver is older than the container's CUDA needs: choose an older cluster.framework "
        "([cluster.image]). The event `environment` (cloudtrain logs RUN) has both versions. An image of your own needs "
        "NVIDIA's cuda-compat package in /usr/local/cuda/compat, which the launcher then uses."
    ),
    on_machine(
        "The driver of this machine is older than the CUDA of its PyTorch needs: update the driver, or install a "
        "PyTorch for an older CUDA. The event `environment` (cloudtrain logs RUN) has both versions."
    ),
)
_FIT_THE_GPU = (
    in_cloud(
        "The container's CUDA does not fit [cluster.instance_type]: choose another cluster.framework ([cluster.image])."
    ),
    on_machine(
        "The PyTorch of this machine does not fit its GPU: install one that was built for it."
    ),
)

_START_DRIVER = (
    (
        "The host's GPUs are not ready: a service of the driver does not run or is of another version, most often NVIDIA's "
        "fabric manager."
    ),
    in_cloud("Submit again with checkpoint.resume: {run}, which takes another instance."),
    on_machine("Restart it, or this machine, and submit again with checkpoint.resume: {run}."),
)
_FIND_GPU = (
    "PyTorch finds no GPU that works:",
    in_cloud(
        "choose a [cluster.instance_type] with GPUs; if it has some, their driver has not started, so submit again, which "
        "takes another instance."
    ),
    on_machine("look for one with nvidia-smi on this machine."),
)
_USE_OTHER_KERNEL = (
    in_cloud("The GPU of [cluster.instance_type] is older than this code needs:"),
    on_machine("The GPU of this machine is older than this code needs:"),
    "choose another kind of attention (in Transformers attn_implementation='sdpa'),",
    in_cloud("or a type with newer GPUs."),
    on_machine("or a newer GPU."),
)
_CUT_KERNEL = (
    "A Triton kernel needs {needed} bytes of the shared memory of the GPU's cores, and",
    in_cloud("[cluster.instance_type] has {limit}:"),
    on_machine("the GPU of this machine has {limit}:"),
    "take smaller blocks or fewer stages for it. A smaller batch changes nothing, nor does more memory.",
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
    # cudaErrorSystemNotReady (802), from PyTorch or NCCL
    Rule(
        FailureClass.SERVICE,
        r"system not yet initialized",
        _START_DRIVER,
        needles=("system not yet initialized",),
    ),
    # NVML, whose tools print it also where nothing fails.
    Rule(
        FailureClass.SERVICE,
        r"Driver/library version mismatch",
        _START_DRIVER,
    ),
    # flash_attn's flash_api.cpp
    Rule(
        FailureClass.USER_CODE,
        r"FlashAttention only supports \w+ GPUs or newer",
        _USE_OTHER_KERNEL,
    ),
    # transformers/training_args.py, also without any GPU
    Rule(
        FailureClass.USER_CODE,
        r"setup doesn't support bf16/gpu",
        "Transformers sees no GPU that computes in bf16: none at all, or one older than Ampere. Train in fp16 there, or where "
        "there are newer GPUs.",
    ),
    # triton/runtime/errors.py
    Rule(
        FailureClass.USER_CODE,
        r"OutOfResources: out of resource: shared memory, Required: (?P<needed>\d+), Hardware limit: (?P<limit>\d+)",
        _CUT_KERNEL,
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
    # ATen/native/cudnn: each engine that it tried has failed, and it does not say why.
    Rule(
        FailureClass.UNKNOWN,
        r"unable to find an engine to execute this computation|Unable to find a valid cuDNN algorithm",
        "cuDNN has found no way to compute a convolution, and does not say why: most often too little GPU memory is left, so "
        "try half of the batch; else its version does not fit PyTorch or the GPU.",
        Causality.SYMPTOM,
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
        r"CUDA driver initialization failed, you might not have a CUDA gpu",
        _FIND_GPU,
    ),
    Rule(
        FailureClass.IMAGE_PULL,
        r"no kernel image is available|Found no NVIDIA driver|No CUDA GPUs are available",
        _FIT_THE_GPU,
    ),
)
