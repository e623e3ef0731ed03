"""Rules for what torchrun, MPI and AWS's toolkit report of processes that ended."""

from __future__ import annotations

from cloudtrain.failure_rules.classes import FailureClass
from cloudtrain.failure_rules.rules.actions import DEBUG_NATIVE_CRASH, READ_FIRST_FAILURE
from cloudtrain.failure_rules.rules.base import Causality, Rule, Source, make_rule

RULES: tuple[Rule, ...] = (
    make_rule(
        FailureClass.UNKNOWN,
        Source.EXCEPTION,
        r"ChildFailedError|SignalException|ExecuteUserScriptError|got signal: 15|SIGTERM|KeyboardInterrupt"
        # A launcher that starts another launcher: facebookresearch/maskrcnn-benchmark#1329.
        r"|CalledProcessError: .*(?:torchrun|torch\.distributed|accelerate|deepspeed|mpirun|python)|SystemExit",
        READ_FIRST_FAILURE,
        Causality.CONSEQUENCE,
    ),
    make_rule(
        FailureClass.UNKNOWN,
        Source.LINE,
        r"(?:was killed by|ended with) SIGTERM|Signal 15 \(SIGTERM\) received by PID",
        READ_FIRST_FAILURE,
        Causality.CONSEQUENCE,
        needles=("SIGTERM",),
    ),
    # Torch's watchdog or an uncaught C++ exception aborted the rank.
    make_rule(
        FailureClass.USER_CODE,
        Source.LINE,
        r"(?:was killed by|ended with) SIG(?:SEGV|ILL|FPE)|Signal (?:11|4|8) \(SIG\w+\) received by PID"
        r"|^Fatal Python error: (?!Aborted)",
        DEBUG_NATIVE_CRASH,
        needles=("SIG", "Fatal Python error"),
    ),
    make_rule(
        FailureClass.UNKNOWN,
        Source.LINE,
        r"(?:was killed by|ended with) SIGABRT|Signal 6 \(SIGABRT\) received by PID",
        DEBUG_NATIVE_CRASH,
        Causality.CONSEQUENCE,
        needles=("SIGABRT",),
    ),
)
