"""Rules for memory: of the GPU, of the host, and shared memory."""

from __future__ import annotations

from cloudtrain.failure_rules.classes import FailureClass
from cloudtrain.failure_rules.rules.base import Causality, Rule, Source

_USE_SMALLER_BATCH = (
    "Halve [train.batch_size] and double [train.accumulate] (the global batch stays the same), "
    "or set [train.precision] to bf16."
)
_USE_LESS_HOST_MEMORY = (
    "Use fewer DataLoader workers or a smaller dataset in memory, or a [cluster.instance_type] with more memory; "
    "memory use that grows from step to step is a leak."
)
_USE_LESS_SHARED_MEMORY = (
    "Shared memory (/dev/shm) is full: lower num_workers or prefetch_factor of the DataLoader; num_workers=0, or a "
    "collate_fn that returns NumPy arrays, needs none. Both sharing strategies of torch.multiprocessing need it."
)

RULES: tuple[Rule, ...] = (
    # torch 2.5 and later: GPU 0 has a total capacity of ...; torch <= 2.0: (GPU 0; 6.00 GiB total capacity; ...).
    # pytorch/pytorch#16417 shows both.
    Rule(
        FailureClass.OUT_OF_MEMORY,
        r"(?:^|: )(?:CUDA|HIP) out of memory\. Tried to allocate [\d.]+ [KMGT]?i?B"
        # cudaErrorMemoryAllocation from a kernel or from NCCL's buffers (issues of NVIDIA/nccl: Cuda failure).
        r"|CUDA error: out of memory|Cuda failure (?:\d+ )?'out of memory'|CUDA_ERROR_OUT_OF_MEMORY",
        _USE_SMALLER_BATCH,
        needles=("out of memory",),
    ),
    # cuBLAS and cuDNN allocate workspaces at their first call; without memory they raise these (pytorch forums). As a
    # log line the text is no failure: a script may have caught the exception.
    Rule(
        FailureClass.OUT_OF_MEMORY,
        r"OutOfMemoryError: |(CUBLAS|CUDNN)_STATUS_(ALLOC_FAILED|NOT_INITIALIZED)",
        _USE_SMALLER_BATCH,
    ),
    # torch/csrc or ATen/MapAllocator.cpp: each tensor of a worker holds a file descriptor (pytorch/pytorch#11201).
    Rule(
        FailureClass.HOST_MEMORY,
        r"Too many open files",
        "Call torch.multiprocessing.set_sharing_strategy('file_system') where the DataLoader is created: each tensor "
        "of a loader worker then holds no file descriptor. Files that the code opens and does not close count, too.",
        needles=("Too many open files",),
    ),
    Rule(
        FailureClass.HOST_MEMORY,
        # torch/utils/data/_utils/signal_handling.py and DataLoader.cpp; open-mmlab/mmsegmentation#1356
        r"insufficient shared memory \(shm\)|killed by signal: Bus error"
        r"|No space left on device.*/(?:dev/shm|torch_)|unable to (?:open|mmap|allocate) shared memory",
        _USE_LESS_SHARED_MEMORY,
        needles=("insufficient shared memory", "Bus error"),
    ),
    # SIGBUS in torchrun's report and in our launcher's message.
    Rule(
        FailureClass.HOST_MEMORY,
        r"Signal 7 \(SIGBUS\) received by PID|was killed by SIGBUS|failed \(exitcode: -7\)",
        _USE_LESS_SHARED_MEMORY,
        needles=("SIGBUS", "exitcode: -7"),
        sources=Source.LINE,
    ),
    # pytorch: c10/core/impl/alloc_cpu.cpp; Python's MemoryError and numpy's _ArrayMemoryError; ENOMEM of fork.
    Rule(
        FailureClass.HOST_MEMORY,
        r"^(?:[\w.]*\.)?_?(?:Array)?MemoryError|DefaultCPUAllocator: |Cannot allocate memory|killed by signal: Killed",
        _USE_LESS_HOST_MEMORY,
    ),
    Rule(
        FailureClass.HOST_MEMORY,
        # Messages of the kernel, where a container shows them.
        r"[Oo]ut of memory: Kill(?:ed)? process|oom-kill:|oom_reaper|Memory cgroup out of memory"
        # Our launcher: rank 3 on algo-2 (local rank 1) was killed by SIGKILL.
        # torchrun: failed (exitcode: -9) local_rank: 5 (pid: 2630); see hpcaitech/ColossalAI#3514.
        r"|(?:was killed by|ended with) SIGKILL|Signal 9 \(SIGKILL\) received by PID|failed \(exitcode: -9\)"
        # A shell: train.sh: line 3:    27 Killed                  python train.py
        r"|^(?:\S+: line \d+:)?\s+\d+ Killed\s|^Killed$"
        # Docker and AWS's toolkit: 128 + SIGKILL.
        r"|(?:[Ee]xit ?[Cc]ode:?|exited with code|return code:?) 137\b",
        _USE_LESS_HOST_MEMORY,
        needles=("oom", "ut of memory", "SIGKILL", "exitcode: -9", "Killed", " 137"),
        sources=Source.LINE,
    ),
    # torch/csrc/DataLoader.cpp: the worker ended its process, so that no exception reached the rank.
    Rule(
        FailureClass.USER_CODE,
        r"DataLoader worker \(pid \d+\) exited unexpectedly with exit code (?P<code>\d+)",
        "A worker of the DataLoader ended its process with exit code {code} and left no traceback: "
        "num_workers=0 shows it, here with cloudtrain submit JOB --local.",
        needles=("exited unexpectedly with exit code",),
    ),
    # torch/utils/data/dataloader.py: the rank's message when one of its workers ended without an exception.
    Rule(
        FailureClass.HOST_MEMORY,
        r"DataLoader worker \(pid(?:\(s\))? [\d, ]+\) exited unexpectedly",
        _USE_LESS_HOST_MEMORY,
        Causality.SYMPTOM,
    ),
)
