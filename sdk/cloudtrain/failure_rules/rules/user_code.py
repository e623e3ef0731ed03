"""Rules for errors in the job's own code. The last one matches every exception."""

from __future__ import annotations

from cloudtrain.failure_rules.classes import FailureClass
from cloudtrain.failure_rules.rules.base import Rule, Source

RULES: tuple[Rule, ...] = (
    # Errors of cloudtrain_runtime.task and .training, printed by worker.py as `error: ...`, and of contract.signatures,
    # printed by launch.py.
    Rule(
        FailureClass.USER_CODE,
        r"^error: (?:.*\.py(?::\d+:\d+)?  |code\.|train\.|\w+\(\) must|the \w+ dataset|loss\(\)|metrics\(\))",
        "Fix what the message names, and try it here first: cloudtrain submit JOB --local.",
        needles=("error: ",),
        sources=Source.LINE,
    ),
    # argparse ends with exit code 2 and without a traceback.
    Rule(
        FailureClass.USER_CODE,
        r"^[\w./-]+\.py: error: (?:unrecognized arguments|the following arguments are required|argument |invalid)",
        "Fix code.args: the script does not accept them.",
        needles=(".py: error: ",),
        sources=Source.LINE,
    ),
    Rule(
        FailureClass.USER_CODE,
        r"can't open file '?(?P<path>[^':]+)'?: \[Errno 2\]",
        "Fix code.script, or include {path} in the bundle: cloudtrain files JOB lists its files.",
        needles=("can't open file",),
        sources=Source.LINE,
    ),
    Rule(
        FailureClass.USER_CODE,
        r"FileNotFoundError: .*'(?P<path>[^']+)'",
        "Include {path} in the bundle (cloudtrain files JOB lists its files), or add it as a channel of data.",
    ),
    Rule(
        FailureClass.USER_CODE,
        r"Expected to have finished reduction in the prior iteration|Expected to mark a variable ready only once",
        "Some parameters do not contribute to the loss: use all outputs, "
        "or wrap the model with find_unused_parameters=True.",
    ),
    # FSDP2 gathers parameters for the backward pass by a hook on a module's output; an in-place change drops the hook.
    Rule(
        FailureClass.USER_CODE,
        r"setStorage: .* out of bounds for storage of size 0",
        "With data: fsdp the output of a module must not be changed in place: "
        "logits = logits / 2 instead of logits /= 2.",
    ),
    Rule(
        FailureClass.USER_CODE,
        r"Expected all tensors to be on the same device",
        "Move model and batch to context().device (or cuda:LOCAL_RANK) before the step at {place}.",
    ),
    Rule(
        FailureClass.USER_CODE,
        r"",
        "Fix {place}, and try it here first: cloudtrain submit JOB --local.",
    ),
)
