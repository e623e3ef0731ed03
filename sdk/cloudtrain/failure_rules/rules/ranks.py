"""Rules for ranks: hangs, the network between them (NCCL, EFA, Gloo, rendezvous), and processes that ended."""

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
from cloudtrain.job.rank_starters import TRAINING_PROGRAMS

_STARTERS = "|".join(rf"\b{program}\b" for program in TRAINING_PROGRAMS)
_DEBUG_NATIVE_CRASH = (
    "A native library crashed: set code.env.PYTHONFAULTHANDLER to 1 to print the Python line,",
    in_cloud("and compare the versions in [code.requirements] with those of the container."),
    on_machine("and compare the versions in [code.requirements] with those on this machine."),
)
_CONNECT_INSTANCES = (
    in_cloud(
        "Allow all traffic between members of [cluster.network.security_groups] (cloudtrain check JOB tests it)."
    ),
    on_machine(
        "On this machine the ranks need only the loopback interface: look for a firewall or a VPN."
    ),
)
_READ_FIRST_FAILURE = "The rank or host that failed first left no trace: read the end of each host's log, and submit again."
_FIND_STUCK_RANK = (
    "Find out why {missing} is stuck at {place}; the stacks of all ranks are in",
    in_account("hang/ of output.tar.gz and beside the checkpoints."),
    here("output/data/hang of the hosts and beside the checkpoints."),
    "If a phase takes this long by design, raise [limits.hang].",
)
_FIND_EFA = (
    in_cloud(
        "NCCL found no EFA device. Check that [cluster.instance_type] has EFA, and that the image contains the EFA "
        "installer's libfabric and aws-ofi-nccl (AWS's images do); the event `environment` lists the host's devices."
    ),
    on_machine(
        "NCCL found no EFA device, which this machine does not need: remove FI_PROVIDER and NCCL_NET from code.env "
        "and the code."
    ),
    *_CONNECT_INSTANCES,
)
_REPAIR_EFA = (
    "EFA does not work here:",
    *_CONNECT_INSTANCES,
    "code.env.FI_EFA_USE_DEVICE_RDMA: 0 disables RDMA.",
)
_READ_NCCL = (
    "Submit again with code.env.NCCL_DEBUG: INFO; the lines with NCCL WARN above the traceback name the cause.",
    *_CONNECT_INSTANCES,
)
_READ_NCCL_WARNINGS = (
    "Submit again with code.env.NCCL_DEBUG: INFO, and read NCCL's warnings.",
    *_CONNECT_INSTANCES,
)
_USE_ONE_PORT = (
    "Two processes listen on one port:",
    for_task(
        "do not call init_process_group in the Task, because the entrypoint has done so, and set neither MASTER_ADDR "
        "nor MASTER_PORT."
    ),
    for_program(
        "call init_process_group once and without an address (MASTER_ADDR and MASTER_PORT are set). A program that "
        "starts its own ranks needs cluster.processes_per_instance: 1."
    ),
)
_REACH_HOSTS = ("The hosts could not connect to each other.", *_CONNECT_INSTANCES)
_FIND_STORE = (
    (
        "The first host, through which the hosts find each other, has ended, or this one no longer reaches it: read the end of "
        "its log. If it was still running:"
    ),
    *_CONNECT_INSTANCES,
)
_NAME_NO_INTERFACE = (
    "NCCL or Gloo finds no network interface to use: most often because NCCL_SOCKET_IFNAME, NCCL_SOCKET_FAMILY or "
    "GLOO_SOCKET_IFNAME, from code.env, the code or the image, names one that this host does not have. Remove it."
)
_USE_NO_PEER_ACCESS = (
    "The GPUs",
    in_cloud("of [cluster.instance_type]"),
    on_machine("of this machine"),
    "do not let each other read their memory, which NCCL has tried: set code.env.NCCL_P2P_DISABLE to 1, which is slower.",
)
_CHOOSE_NO_INTERFACE = (
    "The ranks cannot connect: do not set GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME in code.env.",
    *_CONNECT_INSTANCES,
)

_TAKE_EQUAL_STEPS = (
    "Let every rank take part in each collective to the end.",
    for_task(
        "A rank ends early by os._exit or sys.exit, in the Task or in a library that it calls."
    ),
    for_program(
        "A rank ends early by a return or an exit on some ranks only, or because it has fewer batches: a "
        "DistributedSampler gives each rank equally many."
    ),
)
_EARLY_END = r"ranks? [\d, ]+ on \S+ (?:\(local rank \d+\) )?ended with exit code 0"

RULES: tuple[Rule, ...] = (
    # cloudtrain_runtime/contract/early_ends.py: a rank that left, in the words of the launcher.
    Rule(
        FailureClass.USER_CODE,
        rf"(?:^|: ){_EARLY_END}(?:.*, while|, before its)|hang: no step for .*; {_EARLY_END}",
        _TAKE_EQUAL_STEPS,
        needles=("ended with exit code 0",),
        sources=Source.LINE,
    ),
    # The same, where only the order of the hosts' events shows that others may have waited.
    Rule(
        FailureClass.USER_CODE,
        rf"^{_EARLY_END}",
        _TAKE_EQUAL_STEPS,
        Causality.SYMPTOM,
        needles=("ended with exit code 0",),
        sources=Source.LINE,
    ),
    # cloudtrain/backends/local/backend.py
    Rule(
        FailureClass.MACHINE,
        r"^the supervisor of this run died",
        "Find out what killed it (journalctl -k or dmesg lists what the kernel ended for lack of memory), and continue "
        "from the last checkpoint: cloudtrain resume {run}.",
        sources=Source.REASON,
    ),
    # cloudtrain_runtime/launcher/hang.py: this rule is for a host whose ranks all wait, the next for the host with the
    # rank that they wait for.
    Rule(
        FailureClass.HANG,
        r"^(?:AlgorithmError: )?hang: no step for .*(?: on \S+|rank \d+|\() ?waits in ",
        "Find out what {missing} did instead: its stack is in the log of its host and in output/data/hang.",
        Causality.SYMPTOM,
        needles=("hang: no step",),
        sources=Source.LINE,
    ),
    Rule(
        FailureClass.HANG,
        r"^(?:AlgorithmError: )?hang: no step for .*?; (?P<missing>.*? (?:on \S+?)):? .*?(?P<place>\S+:\d+ in \S+)?$",
        _FIND_STUCK_RANK,
        needles=("hang: no step",),
        sources=Source.LINE,
    ),
    # hiyouga/LlamaFactory#7396 and pytorch/pytorch#118369, from torch 1.13 to 2.9.
    Rule(
        FailureClass.HANG,
        r"Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(?P<number>\d+), OpType=(?P<operation>\w+)"
        r".*?ran for (?P<milliseconds>\d+) milliseconds",
        "Find out what {missing} did instead (its log ends there): a rank that left the loop early, another order of "
        "collectives, or slow work on one rank only, such as saving or evaluating.",
        Causality.SYMPTOM,
        needles=("Watchdog caught collective",),
    ),
    # torch's ProcessGroupGloo::monitoredBarrier
    Rule(
        FailureClass.HANG,
        r"Ranks? (?P<ranks>\d[\d, ]*) failed to pass monitoredBarrier in (?P<milliseconds>\d+) ms",
        "Find out what {missing} did instead: its log ends before the barrier.",
        Causality.SYMPTOM,
        needles=("monitoredBarrier",),
    ),
    # c10d's TCPStore: Timed out after 601 seconds waiting for clients. 15/16 clients joined.
    Rule(
        FailureClass.HANG,
        r"Timed out after \d+ seconds waiting for clients\. (?P<joined>\d+)/(?P<world>\d+) clients joined",
        "{joined} of {world} ranks joined at the start: read the log of the missing host; it may still have "
        "been installing packages or downloading.",
        Causality.SYMPTOM,
        needles=("clients joined",),
    ),
    # torch before 2.3: Timed out initializing process group in store based barrier on rank: 0, for key: ...
    Rule(
        FailureClass.HANG,
        r"in store based barrier on rank: \d+, .*\(world_size=(?P<world>\d+), (?:worker_count|num_workers_joined)=(?P<joined>\d+)",
        "{joined} of {world} ranks joined at the start: read the log of the missing host; it may still have "
        "been installing packages or downloading.",
        Causality.SYMPTOM,
        needles=("store based barrier",),
    ),
    # Gloo: Timed out waiting 1800000ms for recv operation to complete; NCCL: timed out in blocking wait
    Rule(
        FailureClass.HANG,
        r"Timed out waiting (?P<milliseconds>\d+) ?ms for (?:send|recv) operation|timed out in blocking wait"
        r"|wait timeout after \d+ms",
        "Find out what {missing} did instead: a rank that left the loop early, or slow work on one rank only.",
        Causality.SYMPTOM,
    ),
    # libfabric, prov/efa/src/rdm/efa_rdm_util.c: it prints this line and aborts the process.
    Rule(
        FailureClass.NCCL,
        r"FI_EFA_USE_DEVICE_RDMA=1 was set.*no rdma-read capability",
        "Remove FI_EFA_USE_DEVICE_RDMA from code.env, the image and the code: libfabric detects what "
        "the instance's EFA device supports, and aborts if the device does not support what this variable requests.",
        needles=("FI_EFA_USE_DEVICE_RDMA",),
        sources=Source.LINE,
    ),
    # aws-ofi-nccl, nccl_ofi_net.cpp (NET/OFI No eligible providers were found), and libfabric's fi_getinfo without EFA.
    Rule(
        FailureClass.NCCL,
        r"NET/OFI No eligible providers were found|provider efa output empty list",
        _FIND_EFA,
        Causality.SYMPTOM,
        needles=("No eligible providers", "output empty list"),
        sources=Source.LINE,
    ),
    # aws/aws-ofi-nccl#715 (Couldn't open CQ), #161 (Request completed with error), #156 (a security group).
    Rule(
        FailureClass.NCCL,
        r"NET/OFI (?:Request .*completed with error|Couldn't open|Creating new endpoint .* failed)"
        r"|aws-ofi-nccl initialization failed|efa.*(?:Unable to create|prov_err)",
        _REPAIR_EFA,
        Causality.SYMPTOM,
        needles=("NET/OFI", "aws-ofi-nccl", "efa"),
        sources=Source.LINE,
    ),
    # NCCL's bootstrap.cc and socket.cc; Gloo's transport/tcp/device.cc
    Rule(
        FailureClass.NCCL,
        r"Bootstrap : no socket interface found|is neither AF_INET\(2\) nor AF_INET6|Unable to find (?:address|interface) for: ",
        _NAME_NO_INTERFACE,
        needles=("no socket interface found", "neither AF_INET", "Unable to find "),
    ),
    # cudaErrorPeerAccessUnsupported (217) in NCCL's warning and PyTorch's exception
    Rule(
        FailureClass.NCCL,
        r"peer access is not supported between these two devices",
        _USE_NO_PEER_ACCESS,
        needles=("peer access is not supported",),
    ),
    # ncclRemoteError: torch's getNcclErrorDetailStr says "a call failed possibly due to a network error or a remote
    # process exiting prematurely"; torch aborts communicators after an error elsewhere; retrieving ncclUniqueId fails
    # when rank 0 ended before it wrote the id (yifan123/flow_grpo#171).
    Rule(
        FailureClass.NCCL,
        r"ncclRemoteError|NCCL communicator (?:was|has been) aborted|remote process exiting prematurely"
        r"|retrieving ncclUniqueId from|possible application crash on rank",
        _READ_FIRST_FAILURE,
        Causality.CONSEQUENCE,
    ),
    Rule(
        FailureClass.NCCL,
        r"nccl(?:UnhandledCudaError|SystemError|InternalError|InvalidUsage|InvalidArgument)|NCCL error"
        r"|DistBackendError",
        _READ_NCCL,
        Causality.SYMPTOM,
    ),
    # NCCL's warnings begin a line: algo-1:462:462 [0] init.cc:523 NCCL WARN ...
    Rule(
        FailureClass.NCCL,
        r"^\S+:\d+:\d+ \[\d+\] .*NCCL WARN (?!.*(?:[Ff]ailed to find|[Ff]alling back|Could not find|not supported))",
        _READ_NCCL_WARNINGS,
        Causality.SYMPTOM,
        needles=("NCCL WARN",),
        sources=Source.LINE,
    ),
    # c10d's sockets: torch/csrc/distributed/c10d/socket.cpp.
    Rule(
        FailureClass.NCCL,
        r"server socket has failed to listen|EADDRINUSE|[Aa]ddress already in use",
        _USE_ONE_PORT,
        needles=("failed to listen", "EADDRINUSE", "ddress already in use"),
    ),
    # torch/distributed/elastic/rendezvous: at the start it is raised from another exception, which the next rule has.
    Rule(
        FailureClass.NCCL,
        r"The connection to the C10d store has failed",
        _FIND_STORE,
        Causality.CONSEQUENCE,
    ),
    Rule(
        FailureClass.NCCL,
        # Excludes what torchrun logs when the first host, which runs the store, ends before this one.
        r"^(?!.*has failed to (?:shutdown|send a keep-alive)).*(?:client socket has timed out|RendezvousTimeoutError"
        r"|RendezvousConnectionError|rendezvous.*timed? ?out)",
        _REACH_HOSTS,
        Causality.SYMPTOM,
        needles=("client socket", "Rendezvous", "rendezvous"),
    ),
    # Gloo's tcp/pair.cc and c10d: errors after a peer has ended.
    Rule(
        FailureClass.NCCL,
        r"Connection (?:closed|reset) by peer|[Cc]onnection was likely closed|Broken pipe|BrokenPipeError"
        r"|ConnectionResetError|Socket closed|DistNetworkError|DistStoreError|Connection refused|failed to recv"
        r"|RendezvousClosedError|recvValue failed",
        _READ_FIRST_FAILURE,
        Causality.CONSEQUENCE,
    ),
    # Gloo's connectFullMesh with a wrong interface or address: pytorch/pytorch#135355.
    Rule(
        FailureClass.NCCL,
        r"gloo/transport|connectFullMesh failed",
        _CHOOSE_NO_INTERFACE,
        Causality.SYMPTOM,
    ),
    Rule(
        FailureClass.UNKNOWN,
        r"ChildFailedError|SignalException|ExecuteUserScriptError|got signal: 15|SIGTERM|KeyboardInterrupt"
        # A launcher that starts another launcher: facebookresearch/maskrcnn-benchmark#1329.
        rf"|CalledProcessError: .*(?:{_STARTERS}|torch\.distributed|mpirun|python|\bray\b)|SystemExit"
        # Ray's driver repeats the error of a worker, whose own traceback is in the log: Ray Train 2, 2026-11.
        r"|ray\.(?:\w+\.)*(?:WorkerGroupError|TrainingFailedError|RayTaskError)",
        _READ_FIRST_FAILURE,
        Causality.CONSEQUENCE,
    ),
    Rule(
        FailureClass.UNKNOWN,
        r"(?:was killed by|ended with) SIGTERM|Signal 15 \(SIGTERM\) received by PID",
        _READ_FIRST_FAILURE,
        Causality.CONSEQUENCE,
        needles=("SIGTERM",),
        sources=Source.LINE,
    ),
    # Torch's watchdog or an uncaught C++ exception aborted the rank.
    Rule(
        FailureClass.USER_CODE,
        r"(?:was killed by|ended with) SIG(?:SEGV|ILL|FPE)|Signal (?:11|4|8) \(SIG\w+\) received by PID"
        r"|^Fatal Python error: (?!Aborted)|^(?:\S+: line \d+:)?\s*(?:\d+ )?Segmentation fault"
        # glibc, before it aborts the process
        r"|^(?:double free or corruption|corrupted size vs|malloc\(\): |free\(\): invalid|munmap_chunk\(\): )",
        _DEBUG_NATIVE_CRASH,
        needles=(
            *(
                "SIG",
                "Fatal Python error",
                "Segmentation fault",
                "double free",
                "corrupted size vs",
            ),
            *("malloc(): ", "free(): invalid", "munmap_chunk()"),
        ),
        sources=Source.LINE,
    ),
    Rule(
        FailureClass.UNKNOWN,
        r"(?:was killed by|ended with) SIGABRT|Signal 6 \(SIGABRT\) received by PID",
        _DEBUG_NATIVE_CRASH,
        Causality.CONSEQUENCE,
        needles=("SIGABRT",),
        sources=Source.LINE,
    ),
)
