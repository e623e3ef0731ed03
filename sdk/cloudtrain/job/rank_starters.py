"""Programs and functions that start the ranks of a host: as commands, in texts of a script, and as calls in Python."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cloudtrain_runtime.contract.lazy_pattern import lazy_pattern


@dataclass(frozen=True)
class RankStarter:
    """A launcher of ranks.

    Attributes:
        name: Its name in messages.
        commands: Words by which its commands begin.
        modules: Modules that do the same by `python -m MODULE`.
        functions: Functions in Python that do the same.
        texts: Words by which a text or list in a script starts ranks, where not each of its commands does.
        hosts_options: Options by which it joins the ranks of several hosts, of which the first is their number.
        is_word: Whether its name alone may be something else in a script, such as a package or a model.
    """

    name: str
    commands: tuple[tuple[str, ...], ...] = ()
    modules: tuple[str, ...] = ()
    functions: tuple[str, ...] = ()
    texts: tuple[tuple[str, ...], ...] = ()
    hosts_options: str = ""
    is_word: bool = False


_TORCHRUN_HOSTS = (
    "--nnodes $WORLD_SIZE --node-rank $RANK --master-addr $MASTER_ADDR --master-port $MASTER_PORT"
)
_STARTERS = (
    RankStarter(name="torchrun", commands=(("torchrun",),), hosts_options=_TORCHRUN_HOSTS),
    RankStarter(
        name="torch.distributed.run",
        modules=("torch.distributed.run",),
        functions=("torch.distributed.run.main", "torch.distributed.run.run"),
        hosts_options=_TORCHRUN_HOSTS,
    ),
    RankStarter(
        name="torch.distributed.launch",
        modules=("torch.distributed.launch",),
        functions=("torch.distributed.launch.main",),
        hosts_options=_TORCHRUN_HOSTS,
    ),
    RankStarter(
        name="accelerate launch",
        commands=(("accelerate", "launch"), ("accelerate-launch",)),
        modules=("accelerate.commands.launch",),
        functions=(
            "accelerate.commands.launch.launch_command",
            "accelerate.commands.launch.main",
        ),
        hosts_options=(
            "--num_machines $WORLD_SIZE --machine_rank $RANK --main_process_ip $MASTER_ADDR "
            "--main_process_port $MASTER_PORT"
        ),
    ),
    RankStarter(
        name="deepspeed",
        commands=(("deepspeed",),),
        modules=("deepspeed.launcher.runner",),
        functions=("deepspeed.launcher.runner.main",),
        is_word=True,
    ),
    RankStarter(name="yolo", commands=(("yolo",),), is_word=True),
    RankStarter(name="ultralytics", commands=(("ultralytics",),), is_word=True),
    RankStarter(
        name="ray",
        commands=(("ray",),),
        texts=(("ray", "start"), ("ray", "job", "submit")),
    ),
)

LAUNCHING_FUNCTIONS = frozenset(name for each in _STARTERS for name in each.functions)
"""Functions that do what the commands of launchers do."""
SPAWNING_FUNCTIONS = frozenset(
    {
        "torch.multiprocessing.spawn",
        "torch.multiprocessing.spawn.spawn",
        "torch.multiprocessing.start_processes",
        "torch.multiprocessing.spawn.start_processes",
        "torch.multiprocessing.SpawnContext",
        "torch.multiprocessing.spawn.SpawnContext",
        "torch.multiprocessing.ProcessContext",
        "torch.multiprocessing.spawn.ProcessContext",
        "detectron2.engine.launch",
        "detectron2.engine.launch.launch",
    }
)
"""Functions and classes that start processes in the way of `torch.multiprocessing.spawn`, or wait for them."""
RAY_TRAINING = lazy_pattern(r"ray\.train\.(?:\w+\.)*\w*Trainer|ray\.tune\.(?:Tuner|run)")
"""Names that start workers of Ray, each of which is a rank."""

TRAINING_PROGRAMS = tuple(
    dict.fromkeys(words[0] for each in _STARTERS if not each.texts for words in each.commands)
)
"""Programs each of whose commands trains, or prepares it."""

HOSTS_OPTIONS = {each.name: each.hosts_options for each in _STARTERS if each.hosts_options}
"""Options that join several hosts, by the name of the launcher; without the first of them each host trains alone."""

_BY_COMMAND = {words: each.name for each in _STARTERS for words in each.commands}
_BY_MODULE = {module: each.name for each in _STARTERS for module in each.modules}
_WORDS = frozenset(each.name for each in _STARTERS if each.is_word)
_LONGEST = max(map(len, _BY_COMMAND))


def starter_of_program(words: Sequence[str]) -> str | None:
    """Return the launcher of ranks by which a command begins, or None."""
    lengths = range(1, _LONGEST + 1)
    return next(filter(None, (_BY_COMMAND.get(tuple(words[:each])) for each in lengths)), None)


def starter_of_module(module: str) -> str | None:
    """Return the launcher of ranks that `python -m MODULE` starts, or None."""
    return _BY_MODULE.get(module)


def is_starting_text(text: str, *, is_alone: bool) -> bool:
    """Return whether a text of a script, or a list of texts, is a command that starts ranks.

    Args:
        text: The text, or those of the list with spaces between them.
        is_alone: Whether it is no list, or one of a single text.
    """
    if is_alone and text in _WORDS:
        return False
    return _TEXT.match(text) is not None


def _text_patterns() -> Iterator[str]:
    for each in _STARTERS:
        yield from (r"\s+".join(map(re.escape, words)) for words in each.texts or each.commands)


_ANY_MODULE = "|".join(map(re.escape, _BY_MODULE))
_TEXT = lazy_pattern(
    rf"(?:\S*/)?(?:{'|'.join(_text_patterns())}|python\S*\s+(?:-\S+\s+)*-m\s+(?:{_ANY_MODULE}))(?:\s|$)"
    rf"|(?:{_ANY_MODULE})$"
)
