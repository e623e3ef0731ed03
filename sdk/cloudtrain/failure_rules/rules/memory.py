"""Rules for memory: of the GPU, of the host, and shared memory."""

from __future__ import annotations

from cloudtrain.failure_rules.classes import FailureClass
from cloudtrain.failure_rules.rules.base import Causality, Jobs, Part, Places, Rule, Source

_USE_SMALLER_BATCH = (
    Part(
        "Halve [train.batch_size] and double [train.accumulate] (the global batch stays the same), "
        "or set [train.precision] to bf16.",
        Jobs.TASK,
    ),
    Part(
        "Halve the batch size in the code, and accumulate the gradients of twice as many batches (the global batch "
        "stays the same), or compute in bf16 (torch.autocast).",
        Jobs.PROGRAM,
    ),
)
USE_LESS_HOST_MEMORY = (
    Part("Lower [train.workers], or keep less of the dataset in memory,", Jobs.TASK),
    Part("Use fewer DataLoader workers or a smaller dataset in memory,", Jobs.PROGRAM),
    Part("or a [cluster.instance_type] with more memory;", places=Places.CLOUD),
    Part("or a machine with more memory;", places=Places.MACHINE),
    Part("memory use that grows from step to step is a leak."),
)
_FIND_SENDER = (
    Part("Find out who sent SIGKILL. Most often it is the kernel, for lack of host memory:"),
    Part("MemoryUtilization of the job in CloudWatch shows that", places=Places.CLOUD),
    Part("journalctl -k or dmesg shows that", places=Places.MACHINE),
    Part("([train.workers] and what the dataset keeps in memory decide it).", Jobs.TASK),
    Part("(DataLoader workers and what the dataset keeps in memory decide it).", Jobs.PROGRAM),
    Part("Else a person or a program ended it: cloudtrain resume {run}."),
)
_USE_LESS_SHARED_MEMORY = (
    Part("Shared memory (/dev/shm) is full:"),
    Part(
        "lower [train.workers]; 0, or a collate() that returns NumPy arrays, needs none.", Jobs.TASK
    ),
    Part(
        "lower num_workers or prefetch_factor of the DataLoader; num_workers=0, or a collate_fn that returns NumPy "
        "arrays, needs none.",
        Jobs.PROGRAM,
    ),
    Part("Both sharing strategies of torch.multiprocessing need it."),
)
_MAKE_ROOM_FOR_NCCL = (
    Part("Shared memory (/dev/shm) has no room for NCCL."),
    Part("Lower [train.workers], which use it, too,", Jobs.TASK),
    Part("Lower num_workers of the DataLoader, which uses it, too,", Jobs.PROGRAM),
    Part("or set code.env.NCCL_SHM_DISABLE to 1, which is slower."),
)
_FIND_BUS_ERROR = (
    Part(
        "SIGBUS most often means that shared memory (/dev/shm) is full; else, a file that is mapped into memory was cut off."
    ),
    Part("Try [train.workers] 0, which needs no shared memory.", Jobs.TASK),
    Part("Try num_workers=0, which needs no shared memory.", Jobs.PROGRAM),
)
_SHARE_BY_FILE = (
    Part("Call torch.multiprocessing.set_sharing_strategy('file_system')"),
    Part("in the module of the Task:", Jobs.TASK),
    Part("where the DataLoader is created:", Jobs.PROGRAM),
    Part(
        "each tensor of a loader worker then holds no file descriptor. Files that the code opens and does not close "
        "count, too."
    ),
)
_SHOW_WORKER_ERROR = (
    Part(
        "A worker of the DataLoader ended its process with exit code {code} and left no traceback:"
    ),
    Part("train.workers: 0 shows it", Jobs.TASK),
    Part("num_workers=0 shows it", Jobs.PROGRAM),
    Part("when the job runs here: cloudtrain submit JOB --local.", places=Places.ACCOUNT),
    Part("in the next run.", places=Places.HERE),
)
_SHOW_LOST_WORKER = (
    Part(
        "A worker of the DataLoader ended and left no traceback: it was killed, often by the kernel for lack of memory, or "
        "a native library crashed. Its error is shown by"
    ),
    Part("train.workers: 0", Jobs.TASK),
    Part("num_workers=0", Jobs.PROGRAM),
    Part("when the job runs here: cloudtrain submit JOB --local.", places=Places.ACCOUNT),
    Part("in the next run.", places=Places.HERE),
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
