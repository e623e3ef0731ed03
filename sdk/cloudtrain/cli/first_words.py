"""Commands that newcomers look for under the name that another tool gives them."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence

from cloudtrain.errors import nearest

_JOB_SUFFIXES = (".yaml", ".yml", ".json")
_SHORTEST_BEGINNING = 3
_CLOSE = 0.75
"""Similarity of a misspelt command: "stauts" has 0.83 of "status", and "quit" has 0.6 of "submit"."""

MEANT = {
    "abort": "stop RUN",
    "account": "configure --show",
    "apply": "submit JOB",
    "artifacts": "download RUN",
    "attach": "follow RUN",
    "auth": "configure",
    "board": "dashboard",
    "cancel": "stop RUN",
    "cat": "logs RUN",
    "ckpt": "checkpoints RUN",
    "clean": "rm --older-than 30d",
    "config": "configure",
    "continue": "resume RUN",
    "cp": "download RUN",
    "create": "init DIR",
    "create-endpoint": "deploy RUN",
    "create-training-job": "submit JOB",
    "debug": "explain RUN",
    "delete": "rm RUN",
    "delete-endpoint": "undeploy NAME",
    "demo": "init DIR",
    "describe": "status RUN",
    "destroy": "rm RUN",
    "diff": "compare RUN RUN",
    "docs": "--help",
    "down": "stop RUN",
    "dry-run": "plan JOB",
    "dryrun": "plan JOB",
    "end": "stop RUN",
    "endpoint": "list --endpoints",
    "endpoints": "list --endpoints",
    "estimate": "plan JOB",
    "events": "logs RUN",
    "example": "init DIR",
    "examples": "init DIR",
    "exec": "submit JOB --local",
    "experiments": "list",
    "export": "checkpoints export RUN --to safetensors",
    "fit": "submit JOB --local",
    "get": "download RUN",
    "gpus": "prices",
    "grid": "sweep FILE",
    "halt": "stop RUN",
    "history": "metrics RUN",
    "hpo": "sweep FILE",
    "infer": "serve RUN",
    "inference": "serve RUN",
    "info": "status RUN",
    "inspect": "status RUN",
    "instances": "prices",
    "jobs": "list",
    "kill": "stop RUN",
    "launch": "submit JOB",
    "leaderboard": "list",
    "less": "logs RUN",
    "lint": "validate JOB",
    "list-endpoints": "list --endpoints",
    "local": "submit JOB --local",
    "login": "configure",
    "ls": "list",
    "man": "--help",
    "models": "list",
    "monitor": "follow RUN",
    "new": "init DIR",
    "offer": "prices",
    "predict": "serve RUN",
    "preflight": "check JOB",
    "pricing": "prices",
    "profile": "configure --show",
    "profiles": "configure --list",
    "prune": "rm --older-than 30d",
    "ps": "list",
    "pull": "download RUN",
    "purge": "rm --older-than 30d",
    "push": "submit JOB",
    "queue": "list",
    "quickstart": "init DIR",
    "quit": "stop RUN",
    "remove": "rm RUN",
    "requeue": "resume RUN",
    "rerun": "submit JOB --new",
    "restart": "resume RUN",
    "result": "metrics RUN",
    "results": "metrics RUN",
    "retry": "resume RUN",
    "run": "submit JOB --local",
    "runs": "list",
    "sacct": "list",
    "salloc": "submit JOB",
    "save": "download RUN",
    "sbatch": "submit JOB",
    "scancel": "stop RUN",
    "scontrol": "status RUN",
    "search": "sweep FILE",
    "settings": "configure --show",
    "setup": "configure",
    "show": "status RUN",
    "shutdown": "stop RUN",
    "signin": "configure",
    "simulate": "rehearse JOB",
    "sinfo": "prices",
    "spot": "prices",
    "squeue": "list",
    "srun": "submit JOB",
    "start": "submit JOB",
    "stream": "logs RUN -f",
    "tail": "logs RUN -f",
    "tb": "dashboard",
    "template": "init DIR",
    "templates": "init DIR",
    "tensorboard": "dashboard",
    "terminate": "stop RUN",
    "test": "rehearse JOB",
    "top": "dashboard",
    "torchrun": "submit JOB --local",
    "train": "submit JOB --local",
    "tune": "sweep FILE",
    "ui": "dashboard",
    "up": "submit JOB",
    "usage": "costs",
    "verify": "checkpoints verify RUN",
    "version": "--version",
    "view": "status RUN",
    "visualize": "dashboard",
    "wait": "follow RUN",
    "watch": "follow RUN",
    "whoami": "configure --show",
    "why": "explain RUN",
}
"""What to write after `cloudtrain` in place of a word that is no command. Nothing is started by such a word."""


def hint_of_word(words: Sequence[str], commands: Sequence[str]) -> str:
    """Return a hint for a first word that is no command.

    Args:
        words: The words of the command line, beginning with this one.
        commands: The commands.
    """
    meant = _meant(words, commands)
    if meant:
        return f'did you mean "cloudtrain {meant}"?'
    near = nearest(words[0], commands, cutoff=_CLOSE)
    if near is not None:
        return f'did you mean "{near}"?'
    return f"one of: {', '.join(commands)}"


def _meant(words: Sequence[str], commands: Sequence[str]) -> str:
    """Return what to write after `cloudtrain` in place of some words; an empty string if nothing is known."""
    word = words[0].lower()
    if word == "help":
        return " ".join([*(each for each in words[1:2] if each in commands), "--help"])
    if word in MEANT:
        return MEANT[word]
    if word.endswith(_JOB_SUFFIXES) or os.path.isdir(words[0]):  # noqa: PTH112 (fast start)
        return f"plan {shlex.quote(words[0])}"
    # AWS's commands have names such as stop-training-job.
    parts = re.split("[-_]", word)
    if len(parts) > 1:
        own = [each for each in parts if each in commands]
        return own[0] if own else MEANT.get(parts[0], "")
    begun = [each for each in commands if each.startswith(word)]
    if len(word) >= _SHORTEST_BEGINNING and len(begun) == 1:
        return begun[0]
    return ""
