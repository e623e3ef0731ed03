"""Rules for full disks and for checkpoints that cannot be read."""

from __future__ import annotations

from cloudtrain.failure_rules.classes import FailureClass
from cloudtrain.failure_rules.rules.base import (
    Rule,
    Source,
    for_program,
    for_task,
    in_cloud,
    on_machine,
)

FREE_DISK = (
    in_cloud("Raise [cluster.volume] (types with NVMe have a fixed size),"),
    on_machine("Free disk space on this machine (cloudtrain rm deletes old runs),"),
    for_task("keep fewer checkpoints ([checkpoint.keep]),"),
    for_program("keep fewer checkpoints,"),
    "and write only below /opt/ml.",
)
_READ_WITH_ITS_PYTORCH = (
    "{uri} was saved with PyTorch {saved}, and this run has {own}: resume with PyTorch {saved}",
    in_cloud("(cluster.framework or [cluster.image]),"),
    on_machine("(install it on this machine),"),
    "or with a newer cloudtrain. The checkpoint is not damaged.",
)
_USE_OLDER_PYTORCH = (
    "Use an older PyTorch than {own}",
    in_cloud("(cluster.framework or [cluster.image]),"),
    on_machine("(install it on this machine),"),
    "or a newer cloudtrain.",
)
_USE_ALL_RANKS = (
    for_task(
        "A Task trains on all ranks by itself: remove what the code starts of its own, such as another trainer; or, for "
        "a single process, set cluster.processes_per_instance: 1."
    ),
    for_program(
        "Let the trainer use all ranks: in Lightning strategy='ddp', devices= the variable LOCAL_WORLD_SIZE and "
        "num_nodes= the number of instances (Accelerator() of Accelerate joins them by itself); or, for a single "
        "process, set cluster.processes_per_instance: 1."
    ),
)
_READ_OLDER = (
    "The file cannot be read, perhaps because it was cut off. If it is a checkpoint of this job, resume from an older step "
    "of [checkpoint.uri], or start from the beginning with checkpoint.resume: never; else fetch it again."
)

RULES: tuple[Rule, ...] = (
    # errno 28 of Python, tar, pip and torch's writer (PytorchStreamWriter failed writing file ... No space left).
    Rule(
        FailureClass.DISK_FULL,
        r"No space left on device|Errno 28|Disk quota exceeded|ENOSPC",
        FREE_DISK,
    ),
    Rule(
        FailureClass.DISK_FULL,
        r"^(?:ERROR: |tar: |cp: |\w+: ).*No space left on device|^OSError: \[Errno 28\]",
        FREE_DISK,
        needles=("No space left on device",),
        sources=Source.LINE,
    ),
    # errno 30: channels in FastFile mode, and folders that are mounted like them
    Rule(
        FailureClass.USER_CODE,
        r"\[Errno 30\] Read-only file system: '(?P<path>[^']+)'",
        "{path} is in a folder that can only be read, such as a channel of data: let the code write elsewhere, "
        "caches below /tmp and results to SM_OUTPUT_DATA_DIR.",
    ),
    Rule(
        FailureClass.USER_CODE,
        r"\[Errno 13\] Permission denied: '(?P<path>/[^']*/\.cache\b[^']*)'",
        "The job's user may not write {path}, a cache below a home directory: name another folder in the environment, such as "
        "code.env.HF_HOME for Hugging Face.",
    ),
    # errno 5: the device or the network file system, and no full disk.
    Rule(
        FailureClass.UNKNOWN,
        r"\[Errno 5\]|write\(\): fd \d+ failed with Input/output error",
        "The storage has failed while a file was written (Input/output error), so this file is not complete: continue from "
        "the last complete checkpoint; if it fails twice, the disk or the network file system behind the path is broken.",
    ),
    # cloudtrain_runtime/checkpoint/script_api.py
    Rule(
        FailureClass.CHECKPOINT,
        r"checkpoint\.resume: there is no complete checkpoint at (?P<uri>\S+)",
        "Fix [checkpoint.resume]: {uri} holds no complete checkpoint; "
        "the folder or prefix must contain step-*/manifest.json.",
        needles=("checkpoint.resume",),
    ),
    Rule(
        FailureClass.CHECKPOINT,
        r"the checkpoint (?P<uri>\S+) does not fit this model",
        "Resume with the model that wrote {uri}, or start from the beginning: checkpoint.resume: never.",
        needles=("does not fit this model",),
    ),
    # cloudtrain_runtime/checkpoint/shards.py
    Rule(
        FailureClass.CHECKPOINT,
        r"the checkpoint (?P<uri>\S+) cannot be read: .*"
        r"\(saved with PyTorch (?P<saved>[^\s,]+), read with PyTorch (?P<own>[^\s)]+)\)",
        _READ_WITH_ITS_PYTORCH,
        needles=("saved with PyTorch",),
    ),
    Rule(
        FailureClass.CHECKPOINT,
        r"a checkpoint saved with PyTorch (?P<own>\S+) could not be loaded again",
        _USE_OLDER_PYTORCH,
        needles=("could not be loaded again",),
    ),
    # cloudtrain_runtime/integrations/run_control.py and checkpoint/script_api.py; Lightning's torchelastic.py
    Rule(
        FailureClass.USER_CODE,
        r"has not joined them to a process group|checkpoints of several ranks need a process group"
        r"|does not match the world size \(\d+\)",
        _USE_ALL_RANKS,
    ),
    # A folder of transformers' Trainer whose save was interrupted: the Trainer writes trainer_state.json last.
    Rule(
        FailureClass.CHECKPOINT,
        r"No such file or directory: '(?:\S*/)?(?P<folder>checkpoint-\d+)/",
        "{folder} is half a checkpoint, because its save was interrupted: move it out of its folder, so that the run "
        "resumes from the checkpoint before it. An attached loop resumes from complete ones only.",
    ),
    # torch.load of a Git LFS pointer or of a page with an error: their first characters.
    Rule(
        FailureClass.CHECKPOINT,
        r"invalid load key, '(?P<key>[v<])'",
        "The file is no checkpoint: it begins with {key}, as a Git LFS pointer (v: git lfs pull) or a page of a website "
        "(<) does. Fetch the file itself.",
    ),
    # torch.load since 2.6 loads no class that is not allowed (torch/serialization.py, _weights_only_unpickler.py).
    Rule(
        FailureClass.USER_CODE,
        r"Unsupported (?:global|class): (?:GLOBAL )?(?P<name>[\w.]+)",
        "The file is not damaged: torch.load refuses {name} in it. If you trust the file, allow the class with "
        "torch.serialization.add_safe_globals before torch.load, or pass weights_only=False.",
    ),
    Rule(
        FailureClass.USER_CODE,
        r"Weights only load failed",
        "torch.load reads only tensors and classes that are allowed, and the file has others. If you trust the file, "
        "pass weights_only=False to torch.load, or save state_dict() only.",
    ),
    # torch.nn.Module.load_state_dict; torch.distributed.checkpoint.
    Rule(
        FailureClass.CHECKPOINT,
        r"Error\(s\) in loading state_dict|Missing key in checkpoint state_dict",
        "The checkpoint is of another model: load it into the model that wrote it, or load with strict=False what fits; "
        "checkpoint.resume: never starts from the beginning.",
    ),
    # torch/optim/optimizer.py
    Rule(
        FailureClass.CHECKPOINT,
        r"loaded state dict (?:contains a parameter group that doesn't match|has a different number of parameter groups)",
        "The optimizer's state in the checkpoint is of other parameters (another model, or others frozen or grouped): resume "
        "with the code and the settings that wrote it, or load only the model's weights from it.",
    ),
    # torch/utils/checkpoint.py: it computes activations again, and reads no file.
    Rule(
        FailureClass.USER_CODE,
        r"torch\.utils\.checkpoint\.CheckpointError",
        "Activation checkpointing (torch.utils.checkpoint) has computed a part of the model twice, with other results: the "
        "part must not depend on what changes between the two, such as autocast, a random choice or a layer in place.",
    ),
    # safetensors of a Git LFS pointer: the first eight bytes are the length of the header.
    Rule(
        FailureClass.CHECKPOINT,
        r"SafetensorError: .*(?:HeaderTooLarge|InvalidHeader)",
        "The file is no safetensors file, such as a Git LFS pointer (git lfs pull) or a page of a website. Fetch the file "
        "itself.",
    ),
    # A truncated zip (PytorchStreamReader), safetensors file or pickle.
    Rule(
        FailureClass.CHECKPOINT,
        r"^EOFError: Ran out of input",
        _READ_OLDER,
        raised_in=r"/torch/(?:serialization|distributed/checkpoint/)",
    ),
    Rule(
        FailureClass.CHECKPOINT,
        r"CheckpointException|CheckpointError|PytorchStreamReader failed|invalid load key|MetadataIncompleteBuffer",
        _READ_OLDER,
    ),
)
