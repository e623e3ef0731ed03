"""Rules for collectives that time out and ranks that make no progress."""

from __future__ import annotations

from cloudtrain.failure_rules.classes import FailureClass
from cloudtrain.failure_rules.rules.base import Causality, Rule, Source, make_rule

RULES: tuple[Rule, ...] = (
    # cloudtrain_runtime/launcher/hang.py: this rule is for a host whose ranks all wait, the next for the host with the
    # rank that they wait for.
    make_rule(
        FailureClass.HANG,
        Source.LINE,
        r"^(?:AlgorithmError: )?hang: no step for .*(?: on \S+|rank \d+|\() ?waits in ",
        "Find out what {missing} did instead: its stack is in the log of its host and in output/data/hang.",
        Causality.SYMPTOM,
        needles=("hang: no step",),
    ),
    make_rule(
        FailureClass.HANG,
        Source.LINE,
        r"^(?:AlgorithmError: )?hang: no step for .*?; (?P<missing>.*? (?:on \S+?)):? .*?(?P<place>\S+:\d+ in \S+)?$",
        "Find out why {missing} is stuck at {place}; the stacks of all ranks are in hang/ of output.tar.gz "
        "and beside the checkpoints. If a phase takes this long by design, raise [limits.hang].",
        needles=("hang: no step",),
    ),
    # hiyouga/LlamaFactory#7396 and pytorch/pytorch#118369, from torch 1.13 to 2.9.
    make_rule(
        FailureClass.HANG,
        Source.EXCEPTION | Source.LINE,
        r"Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(?P<number>\d+), OpType=(?P<operation>\w+)"
        r".*?ran for (?P<milliseconds>\d+) milliseconds",
        "Find out what {missing} did instead (its log ends there): a rank that left the loop early, another order of "
        "collectives, or slow work on one rank only, such as saving or evaluating.",
        Causality.SYMPTOM,
        needles=("Watchdog caught collective",),
    ),
    # torch's ProcessGroupGloo::monitoredBarrier
    make_rule(
        FailureClass.HANG,
        Source.EXCEPTION | Source.LINE,
        r"Ranks? (?P<ranks>\d[\d, ]*) failed to pass monitoredBarrier in (?P<milliseconds>\d+) ms",
        "Find out what {missing} did instead: its log ends before the barrier.",
        Causality.SYMPTOM,
        needles=("monitoredBarrier",),
    ),
    # c10d's TCPStore: Timed out after 601 seconds waiting for clients. 15/16 clients joined.
    make_rule(
        FailureClass.HANG,
        Source.EXCEPTION | Source.LINE,
        r"Timed out after \d+ seconds waiting for clients\. (?P<joined>\d+)/(?P<world>\d+) clients joined",
        "{joined} of {world} ranks joined at the start: read the log of the missing host; it may still have "
        "been installing packages or downloading.",
        Causality.SYMPTOM,
        needles=("clients joined",),
    ),
    # Gloo: Timed out waiting 1800000ms for recv operation to complete; NCCL: timed out in blocking wait
    make_rule(
        FailureClass.HANG,
        Source.EXCEPTION,
        r"Timed out waiting (?P<milliseconds>\d+) ?ms for (?:send|recv) operation|timed out in blocking wait"
        r"|wait timeout after \d+ms",
        "Find out what {missing} did instead: a rank that left the loop early, or slow work on one rank only.",
        Causality.SYMPTOM,
    ),
)
