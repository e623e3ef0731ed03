"""Rules for the network between ranks: NCCL, EFA, Gloo, rendezvous."""

from __future__ import annotations

from cloudtrain.failure_rules.classes import FailureClass
from cloudtrain.failure_rules.rules.actions import CONNECT_INSTANCES, READ_FIRST_FAILURE
from cloudtrain.failure_rules.rules.base import Causality, Rule, Source, make_rule

RULES: tuple[Rule, ...] = (
    # libfabric, prov/efa/src/rdm/efa_rdm_util.c: it prints this line and aborts the process.
    make_rule(
        FailureClass.NCCL,
        Source.LINE,
        r"FI_EFA_USE_DEVICE_RDMA=1 was set.*no rdma-read capability",
        "Remove FI_EFA_USE_DEVICE_RDMA from code.env, the image and the script: libfabric detects what "
        "the instance's EFA device supports, and aborts if the device does not support what this variable requests.",
        needles=("FI_EFA_USE_DEVICE_RDMA",),
    ),
    # aws/aws-ofi-nccl#715 (Couldn't open CQ), #161 (Request completed with error), #156 (a security group).
    make_rule(
        FailureClass.NCCL,
        Source.LINE,
        r"NET/OFI (?:Request .*completed with error|Couldn't open|Creating new endpoint .* failed)"
        r"|aws-ofi-nccl initialization failed|efa.*(?:Unable to create|prov_err)",
        "EFA does not work here: " + CONNECT_INSTANCES + " code.env.FI_EFA_USE_DEVICE_RDMA: 0 disables RDMA.",
        Causality.SYMPTOM,
        needles=("NET/OFI", "aws-ofi-nccl", "efa"),
    ),
    # ncclRemoteError: torch's getNcclErrorDetailStr says "a call failed possibly due to a network error or a remote
    # process exiting prematurely"; torch aborts communicators after an error elsewhere; retrieving ncclUniqueId fails
    # when rank 0 ended before it wrote the id (yifan123/flow_grpo#171).
    make_rule(
        FailureClass.NCCL,
        Source.EXCEPTION,
        r"ncclRemoteError|NCCL communicator (?:was|has been) aborted|remote process exiting prematurely"
        r"|retrieving ncclUniqueId from|possible application crash on rank",
        READ_FIRST_FAILURE,
        Causality.CONSEQUENCE,
    ),
    make_rule(
        FailureClass.NCCL,
        Source.EXCEPTION,
        r"nccl(?:UnhandledCudaError|SystemError|InternalError|InvalidUsage|InvalidArgument)|NCCL error"
        r"|DistBackendError",
        "Submit again with code.env.NCCL_DEBUG: INFO; the lines with NCCL WARN above the traceback name the cause. "
        + CONNECT_INSTANCES,
        Causality.SYMPTOM,
    ),
    # NCCL's warnings begin a line: algo-1:462:462 [0] init.cc:523 NCCL WARN ...
    make_rule(
        FailureClass.NCCL,
        Source.LINE,
        r"^\S+:\d+:\d+ \[\d+\] .*NCCL WARN (?!.*(?:[Ff]ailed to find|[Ff]alling back|Could not find|not supported))",
        "Submit again with code.env.NCCL_DEBUG: INFO, and read NCCL's warnings. " + CONNECT_INSTANCES,
        Causality.SYMPTOM,
        needles=("NCCL WARN",),
    ),
    # c10d's sockets: torch/csrc/distributed/c10d/socket.cpp.
    make_rule(
        FailureClass.NCCL,
        Source.EXCEPTION | Source.LINE,
        r"server socket has failed to listen|EADDRINUSE|[Aa]ddress already in use",
        "Two processes listen on one port: call init_process_group once and without an address "
        "(MASTER_ADDR and MASTER_PORT are set). A script that starts its own ranks needs "
        "cluster.processes_per_instance: 1.",
        needles=("failed to listen", "EADDRINUSE", "ddress already in use"),
    ),
    make_rule(
        FailureClass.NCCL,
        Source.EXCEPTION | Source.LINE,
        # Excludes what torchrun logs when the first host, which runs the store, ends before this one.
        r"^(?!.*has failed to (?:shutdown|send a keep-alive)).*(?:client socket has timed out|RendezvousTimeoutError"
        r"|RendezvousConnectionError|rendezvous.*timed? ?out)",
        "The hosts could not connect to each other. " + CONNECT_INSTANCES,
        Causality.SYMPTOM,
        needles=("client socket", "Rendezvous", "rendezvous"),
    ),
    # Gloo's tcp/pair.cc and c10d: errors after a peer has ended.
    make_rule(
        FailureClass.NCCL,
        Source.EXCEPTION,
        r"Connection (?:closed|reset) by peer|[Cc]onnection was likely closed|Broken pipe|BrokenPipeError"
        r"|ConnectionResetError|Socket closed|DistNetworkError|DistStoreError|Connection refused|failed to recv"
        r"|RendezvousClosedError|recvValue failed",
        READ_FIRST_FAILURE,
        Causality.CONSEQUENCE,
    ),
    # Gloo's connectFullMesh with a wrong interface or address: pytorch/pytorch#135355.
    make_rule(
        FailureClass.NCCL,
        Source.EXCEPTION,
        r"gloo/transport|connectFullMesh failed",
        "The ranks cannot connect: do not set GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME in code.env. "
        + CONNECT_INSTANCES,
        Causality.SYMPTOM,
    ),
)
