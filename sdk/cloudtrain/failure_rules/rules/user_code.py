"""Rules for errors in the job's own code. The last one matches every exception."""

from __future__ import annotations

from cloudtrain.failure_rules.classes import FailureClass
from cloudtrain.failure_rules.rules.base import (
    Causality,
    Jobs,
    Part,
    Rule,
    Source,
    for_program,
    for_task,
    here,
    in_account,
    in_cloud,
    on_machine,
)

_FIX_NAMED = (
    in_account("Fix what the message names, and try it here first: cloudtrain submit JOB --local."),
    here("Fix what the message names."),
)
_FIX_PLACE = (
    in_account("Fix {place}, and try it here first: cloudtrain submit JOB --local."),
    here("Fix {place}."),
)
_FIX_ARGUMENTS = (
    for_task("Fix code.args: the Task does not accept them."),
    Part("Fix code.args: the script does not accept them.", Jobs.SCRIPT),
    Part("Fix code.args: the module does not accept them.", Jobs.MODULE),
    Part("Fix the arguments in code.command: the program does not accept them.", Jobs.COMMAND),
)
_FIX_ENTRY = (
    for_task("Fix code.task,"),
    Part("Fix code.script,", Jobs.SCRIPT),
    Part("Fix code.module,", Jobs.MODULE),
    Part("Fix code.command,", Jobs.COMMAND),
    "or include {path} in the bundle: cloudtrain files JOB lists its files.",
)
_USE_ALL_PARAMETERS = (
    "Some parameters do not contribute to the loss:",
    for_task(
        "use all outputs, freeze those parameters in model(), or set train.parallel.find_unused: true."
    ),
    for_program("use all outputs, or wrap the model with find_unused_parameters=True."),
)
_GIVE_MORE_SAMPLES = (
    "Batch norm got a batch of one sample, perhaps the last one of an epoch:",
    for_task("set train.drop_last: true, or raise train.batch_size."),
    for_program("use drop_last=True in the DataLoader, or larger batches."),
)
_EQUAL_SHAPES = (
    (
        "Ranks have called different collectives, or the same with tensors of different sizes. Where a loss gathers "
        "tensors of all ranks, the last batch of an epoch can be smaller on some:"
    ),
    for_task("set train.drop_last: true."),
    for_program("use drop_last=True in the DataLoader and its sampler."),
)
_CHANGE_NOTHING_IN_PLACE = (
    for_task("With train.parallel.data: fsdp"),
    for_program("With FSDP"),
    "the output of a module must not be changed in place: logits = logits / 2 instead of logits /= 2.",
)
_MOVE_TO_DEVICE = (
    for_task(
        "Model and batch are on context().device: create other tensors there, too, before the step at {place}."
    ),
    for_program(
        "Move model and batch to the rank's device (cuda:LOCAL_RANK) before the step at {place}."
    ),
)
_TAKE_VISIBLE_GPUS = (
    "The code asks for the GPUs {asked}, and this process sees fewer:",
    for_task("let it take those that are there (context().device)."),
    for_program("in Lightning, devices='auto' takes those that are there."),
)

_USE_NEWER_PYTHON = (
    "Types joined by | need Python 3.10, and this Python is older: use a newer one",
    in_cloud("(cluster.framework or [cluster.image]),"),
    on_machine("on this machine,"),
    "or, for annotations, write from __future__ import annotations at the top of the file.",
)
_FIX_OVERRIDES = (
    "Hydra cannot compose the configuration: fix what the message names in its files or in",
    Part("code.command", Jobs.COMMAND),
    Part("code.args", Jobs.ALL & ~Jobs.COMMAND),
    "(+key=value adds a key that the configuration lacks).",
)

RULES: tuple[Rule, ...] = (
    # Errors of cloudtrain_runtime.task and .training, printed by worker.py as `error: ...`, and of contract.signatures,
    # printed by launch.py.
    Rule(
        FailureClass.USER_CODE,
        r"^error: (?:.*\.py(?::\d+:\d+)?  |code\.|train\.|\w+\(\) must|the \w+ dataset|loss\(\)|metrics\(\))",
        _FIX_NAMED,
        needles=("error: ",),
        sources=Source.LINE,
    ),
    # argparse ends with exit code 2 and without a traceback.
    Rule(
        FailureClass.USER_CODE,
        r"^[\w./-]+\.py: error: (?:unrecognized arguments|the following arguments are required|argument |invalid)",
        _FIX_ARGUMENTS,
        needles=(".py: error: ",),
        sources=Source.LINE,
    ),
    # hydra/_internal: without HYDRA_FULL_ERROR it prints the message only.
    Rule(
        FailureClass.USER_CODE,
        r"^Could not override '[^']+'|^In '[^']*': Could not find '[^']+'|hydra\.errors\.(?:ConfigComposition|MissingConfig"
        r"|OverrideParse)Exception",
        _FIX_OVERRIDES,
        needles=("Could not override '", ": Could not find '"),
    ),
    # PyYAML names the file where it has read one; with `while` it names where the part begins that it could not end.
    Rule(
        FailureClass.USER_CODE,
        r"^yaml\.[\w.]+Error: [\s\S]*\bin \"(?P<file>[^\"<]+)\", line (?P<line>\d+)",
        "{file} is no YAML: fix it at line {line}, or soon after it.",
    ),
    # torch/distributed/rendezvous.py
    Rule(
        FailureClass.USER_CODE,
        r"environment variable (?P<name>RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT) expected, but not set",
        "A process group needs {name}, which the ranks that this job starts have: this process is none of them, or something "
        "has removed it from its environment.",
    ),
    # deepspeed/runtime/config.py
    Rule(
        FailureClass.USER_CODE,
        r"train_batch_size is not equal to .* world_size\s*(?P<total>\d+) != (?P<micro>\d+) \* (?P<steps>\d+) \* (?P<world>\d+)",
        "DeepSpeed's configuration wants {total} samples in a step, and {micro} of each rank, {steps} times, on the {world} "
        "ranks that it sees, give another number: leave one of the three sizes out, or correct it.",
    ),
    # deepspeed/runtime/fp16; fairseq
    Rule(
        FailureClass.USER_CODE,
        r"Current loss scale already at minimum|Minimum loss scale reached",
        "In fp16 the gradients have overflowed step after step, so the loss is infinite or not a number. Compute in bf16, or "
        "lower the learning rate; if the loss was bad before, look at the data of these steps.",
    ),
    # Python before 3.10, of an annotation such as int | None
    Rule(
        FailureClass.USER_CODE,
        r"unsupported operand type\(s\) for \|: '(?:type|NoneType|_\w*GenericAlias)' and '(?:type|NoneType|_\w*GenericAlias)'",
        _USE_NEWER_PYTHON,
    ),
    Rule(
        FailureClass.USER_CODE,
        r"wandb\S*Error: .*Run initialization has timed out",
        "Weights & Biases was not reached in time, most often because there is no internet access here: set "
        "code.env.WANDB_MODE to offline, or give the job access.",
    ),
    # wandb/sdk, of the server's answer
    Rule(
        FailureClass.USER_CODE,
        r"wandb\S*Error: .*(?:403|[Pp]ermission denied|do not have permission)",
        "Weights & Biases knows the key, and its user may not write to this project: name an entity that it belongs to in "
        "code.env.WANDB_ENTITY or in the code, or use another key.",
    ),
    # bash, of a script with Windows line endings
    Rule(
        FailureClass.USER_CODE,
        r"\$'\\r': command not found|bad interpreter: \S+\^M",
        "A file of shell commands has Windows line endings: convert it by dos2unix, and set eol=lf for it in Git's "
        "attributes.",
        needles=("$'\\r': command not found", "bad interpreter"),
        sources=Source.LINE,
    ),
    # mlflow/store: a parameter is written once.
    Rule(
        FailureClass.USER_CODE,
        r"Parameter with key (?P<key>\S+) was already logged with a value",
        "A run of MLflow keeps one value of each parameter, and this code gives {key} another one: log parameters on rank 0 "
        "only, and not again in a run that is resumed.",
        needles=("was already logged with a value",),
    ),
    # Lightning's accelerator_connector
    Rule(
        FailureClass.USER_CODE,
        r"You requested [Gg][Pp][Uu]s?: \[(?P<asked>[\d, ]+)\]",
        _TAKE_VISIBLE_GPUS,
        needles=("You requested",),
        sources=Source.LINE | Source.EXCEPTION,
    ),
    # pickle, of what multiprocessing sends to a process that it spawns
    Rule(
        FailureClass.USER_CODE,
        r"Can't pickle local object '(?P<object>[^']+)'|Can't get local object '(?P<local>[^']+)'",
        "A process that is spawned gets its objects by pickle, which cannot store a function or class that is defined in "
        "another function: define it at the top of the module.",
        needles=("Can't pickle local object", "Can't get local object"),
    ),
    # multiprocessing/spawn.py, in a new process: the one that started it has printed why nothing was sent.
    Rule(
        FailureClass.USER_CODE,
        r"^EOFError: Ran out of input",
        _FIX_NAMED,
        Causality.CONSEQUENCE,
        raised_in=r"/multiprocessing/spawn\.py$",
    ),
    Rule(
        FailureClass.USER_CODE,
        r"can't open file '?(?P<path>[^':]+)'?: \[Errno 2\]",
        _FIX_ENTRY,
        needles=("can't open file",),
        sources=Source.LINE,
    ),
    # importlib/_bootstrap.py
    Rule(
        FailureClass.USER_CODE,
        r"ImportError: attempted relative import (?:with no known parent package|beyond top-level package)",
        "The import at {place} is relative to a package, and Python has imported the file without one: write the "
        "absolute name.",
    ),
    # nbconvert exports magic commands (%, !) as calls of this function of IPython.
    Rule(
        FailureClass.USER_CODE,
        r"NameError: name 'get_ipython' is not defined",
        "The code was exported from a notebook, and only notebooks have get_ipython: remove the lines with it ({place}).",
    ),
    Rule(
        FailureClass.USER_CODE,
        r"FileNotFoundError: .*'(?P<path>[^']+)'",
        "Include {path} in the bundle (cloudtrain files JOB lists its files), or add it as a channel of data.",
    ),
    Rule(
        FailureClass.USER_CODE,
        r"Expected to have finished reduction in the prior iteration|Expected to mark a variable ready only once"
        # Lightning's overrides/distributed.py
        r"|parameters that were not used in producing the loss",
        _USE_ALL_PARAMETERS,
    ),
    # wandb/errors, wandb/sdk/lib/apikey.py
    Rule(
        FailureClass.USER_CODE,
        r"wandb\S*: .*(?:[Nn]o API key configured|API key must be|not logged in)|api_key not configured \(no-tty\)",
        "Weights & Biases has no key here: give it to the job as a secret in code.env.WANDB_API_KEY, or set "
        "code.env.WANDB_MODE to offline.",
    ),
    Rule(
        FailureClass.USER_CODE,
        r"Expected more than 1 value per channel when training",
        _GIVE_MORE_SAMPLES,
    ),
    # Gloo's check of a message, and that of TORCH_DISTRIBUTED_DEBUG=DETAIL. NCCL has none, and hangs.
    Rule(
        FailureClass.USER_CODE,
        r"op\.preamble\.length <= op\.nbytes|Detected mismatch between collectives on ranks",
        _EQUAL_SHAPES,
        needles=("op.preamble.length", "Detected mismatch"),
        sources=Source.LINE,
    ),
    # FSDP2 gathers parameters for the backward pass by a hook on a module's output; an in-place change drops the hook.
    Rule(
        FailureClass.USER_CODE,
        r"setStorage: .* out of bounds for storage of size 0",
        _CHANGE_NOTHING_IN_PLACE,
    ),
    Rule(
        FailureClass.USER_CODE,
        r"Expected all tensors to be on the same device",
        _MOVE_TO_DEVICE,
    ),
    Rule(
        FailureClass.USER_CODE,
        r"",
        _FIX_PLACE,
    ),
)
