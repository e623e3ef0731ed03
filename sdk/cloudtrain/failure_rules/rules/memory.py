"""Rules for memory: of the GPU, of the host, and shared memory."""

from __future__ import annotations

from cloudtrain.failure_rules.classes import FailureClass
from cloudtrain.failure_rules.rules.base import (
    Causality,
    Rule,
    Source,
    for_program,
    for_task,
    here,
    in_account,
    in_cloud,
    on_machine,
)

_USE_SMALLER_BATCH = (
    for_task(
        "Halve [train.batch_size] and double [train.accumulate] (the global batch stays the same), "
        "or set [train.precision] to bf16."
    ),
    for_program(
        "Halve the batch size in the code, and accumulate the gradients of twice as many batches (the global batch "
        "stays the same), or compute in bf16 (torch.autocast)."
    ),
)
USE_LESS_HOST_MEMORY = (
    for_task("Lower [train.workers], or keep less of the dataset in memory,"),
    for_program("Use fewer DataLoader workers or a smaller dataset in memory,"),
    in_cloud("or a [cluster.instance_type] with more memory;"),
    on_machine("or a machine with more memory;"),
    "memory use that grows from step to step is a leak.",
)
_FIND_SENDER = (
    "Find out who sent SIGKILL. Most often it is the kernel, for lack of host memory:",
    in_cloud("MemoryUtilization of the job in CloudWatch shows that"),
    on_machine("journalctl -k or dmesg shows that"),
    for_task("([train.workers] and what the dataset keeps in memory decide it)."),
    for_program("(DataLoader workers and what the dataset keeps in memory decide it)."),
    "Else a person or a program ended it: cloudtrain resume {run}.",
)
_USE_LESS_SHARED_MEMORY = (
    "Shared memory (/dev/shm) is full:",
    for_task("lower [train.workers]; 0, or a collate() that returns NumPy arrays, needs none."),
    for_program(
        "lower num_workers or prefetch_factor of the DataLoader; num_workers=0, or a collate_fn that returns NumPy "
        "arrays, needs none."
    ),
    "Both sharing strategies of torch.multiprocessing need it.",
)
_MAKE_ROOM_FOR_NCCL = (
    "Shared memory (/dev/shm) has no room for NCCL.",
    for_task("Lower [train.workers], which use it, too,"),
    for_program("Lower num_workers of the DataLoader, which uses it, too,"),
    "or set code.env.NCCL_SHM_DISABLE to 1, which is slower.",
)
_FIND_BUS_ERROR = (
    "SIGBUS most often means that shared memory (/dev/shm) is full; else, a file that is mapped into memory was cut off.",
    for_task("Try [train.workers] 0, which needs no shared memory."),
    for_program("Try num_workers=0, which needs no shared memory."),
)
_SHARE_BY_FILE = (
    "Call torch.multiprocessing.set_sharing_strategy('file_system')",
    for_task("in the module of the Task:"),
    for_program("where the DataLoader is created:"),
    (
        "each tensor of a loader worker then holds no file descriptor. Files that the code opens and does not close "
        "count, too."
    ),
)
_SHOW_WORKER_ERROR = (
    "A worker of the DataLoader ended its process with exit code {code} and left no traceback:",
    for_task("train.workers: 0 shows it"),
    for_program("num_workers=0 shows it"),
    in_account("when the job runs here: cloudtrain submit JOB --local."),
    here("in the next run."),
)
_SHOW_LOST_WORKER = (
    (
        "A worker of the DataLoader ended and left no traceback: it was killed, often by the kernel for lack of memory, or "
        "a native library crashed. Its error is shown by"
    ),
    for_task("train.workers: 0"),
    for_program("num_workers=0"),
    in_account("when the job runs here: cloudtrain submit JOB --local."),
    here("in the next run."),
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
    # Ray ends tasks before the kernel has to.
    Rule(
        FailureClass.HOST_MEMORY,
        r"node running low on memory|killed due to memory pressure \(OOM\)",
        USE_LESS_HOST_MEMORY,
        needles=("running low on memory", "memory pressure (OOM)"),
    ),
    # The JVM of Spark has a limit of its own.
    Rule(
        FailureClass.HOST_MEMORY,
        r"java\.lang\.OutOfMemoryError",
        "A Java process, such as that of Spark, has used up the memory that it may take, which is not that of the GPU: raise "
        "its limit (in Spark spark.driver.memory), or give it less data at once.",
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
        _SHARE_BY_FILE,
        needles=("Too many open files",),
    ),
    # NCCL's shmutils.h, in its warning and in PyTorch's exception
    Rule(
        FailureClass.HOST_MEMORY,
        r"Error while creating shared memory segment /dev/shm/nccl|Call to posix_fallocate failed: No space left",
        _MAKE_ROOM_FOR_NCCL,
        needles=("Error while creating shared memory", "posix_fallocate failed"),
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
        _FIND_BUS_ERROR,
        needles=("SIGBUS", "exitcode: -7"),
        sources=Source.LINE,
    ),
    # pytorch: c10/core/impl/alloc_cpu.cpp; Python's MemoryError and numpy's _ArrayMemoryError; ENOMEM of fork.
    Rule(
        FailureClass.HOST_MEMORY,
        r"^(?:[\w.]*\.)?_?(?:Array)?MemoryError|DefaultCPUAllocator: |Cannot allocate memory",
        USE_LESS_HOST_MEMORY,
    ),
    Rule(
        FailureClass.HOST_MEMORY,
        # Messages of the kernel, where a container shows them.
        r"[Oo]ut of memory: Kill(?:ed)? process|oom-kill:|oom_reaper|Memory cgroup out of memory"
        # cloudtrain_runtime/launcher/oom_kills.py
        r"|the kernel has ended \d+ process(?:es)? for lack of memory",
        USE_LESS_HOST_MEMORY,
        needles=("oom", "ut of memory", "for lack of memory"),
        sources=Source.LINE | Source.EXCEPTION,
    ),
    Rule(
        FailureClass.HOST_MEMORY,
        # cloudtrain/backends/slurm/queue_states.py: state OUT_OF_MEMORY.
        r"used more memory than Slurm gave the job",
        (
            "Ask Slurm for more, such as --mem=0 in slurm.sbatch for all of a node's,",
            for_task("or lower [train.workers], or keep less of the dataset in memory;"),
            for_program("or use fewer DataLoader workers or a smaller dataset in memory;"),
            "memory use that grows from step to step is a leak.",
        ),
        sources=Source.REASON,
    ),
    # SIGKILL names no sender: the kernel for lack of memory, a person, a scheduler.
    Rule(
        FailureClass.KILLED,
        # Our launcher: rank 3 on algo-2 (local rank 1) was killed by SIGKILL.
        # torchrun: failed (exitcode: -9) local_rank: 5 (pid: 2630); see hpcaitech/ColossalAI#3514.
        r"(?:was killed by|ended with) SIGKILL|Signal 9 \(SIGKILL\) received by PID|failed \(exitcode: -9\)"
        # A shell: train.sh: line 3:    27 Killed                  python train.py
        r"|^(?:\S+: line \d+:)?\s+\d+ Killed\s|^Killed$"
        # Docker and AWS's toolkit: 128 + SIGKILL.
        r"|(?:[Ee]xit ?[Cc]ode:?|exited with code|return code:?) 137\b"
        # DeepSpeed's launcher, at the end of a line with the whole command.
        r"|exits with return code = -9\b",
        _FIND_SENDER,
        needles=("SIGKILL", "exitcode: -9", "Killed", " 137", "return code = -9"),
        sources=Source.LINE,
    ),
    # torch/utils/data/_utils/signal_handling.py
    Rule(FailureClass.KILLED, r"killed by signal: Killed", _FIND_SENDER),
    # torch/csrc/DataLoader.cpp: the worker ended its process, so that no exception reached the rank.
    Rule(
        FailureClass.USER_CODE,
        r"DataLoader worker \(pid \d+\) exited unexpectedly with exit code (?P<code>\d+)",
        _SHOW_WORKER_ERROR,
        needles=("exited unexpectedly with exit code",),
    ),
    # torch/utils/data/dataloader.py: the rank's message when one of its workers ended without an exception.
    Rule(
        FailureClass.UNKNOWN,
        r"DataLoader worker \(pid(?:\(s\))? [\d, ]+\) exited unexpectedly",
        _SHOW_LOST_WORKER,
        Causality.SYMPTOM,
    ),
)
