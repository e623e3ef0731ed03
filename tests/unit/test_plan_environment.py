"""Plans with variables that replace what a container needs, and with more than Linux passes to a process."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from support.plans import SCRIPT_JOB, PlanOf, local, refusal

import cloudtrain_runtime
from cloudtrain.planning.environment_checks import MAX_STRING_BYTES, MAX_TOTAL_BYTES
from cloudtrain_runtime.contract import (
    REHEARSAL_FORKS_VARIABLE,
    REHEARSAL_HOLD_VARIABLE,
    REHEARSAL_LAST_VARIABLE,
    REHEARSAL_SAMPLES_VARIABLE,
)
from cloudtrain_runtime.contract.argument_variables import argument_variables
from cloudtrain_runtime.contract.run_variables import setter_of

OWN_IMAGE = "cluster.image=123456789012.dkr.ecr.us-west-2.amazonaws.com/train:1"
COMMAND = SCRIPT_JOB.replace("script: train.py", "command: [python3, -c, pass]")
SWITCHES = {
    "CLOUDTRAIN_LOG_EVERY_STEPS",
    "CLOUDTRAIN_WORKER_START",
}
"""Variables of the runtime that a job may set, by the documentation."""


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("AWS_PROFILE", "team", "the container has no AWS profiles"),
        ("AWS_DEFAULT_PROFILE", "team", "the container has no AWS profiles"),
        ("PATH", "/opt/tools/bin", "it replaces PATH of AWS's image"),
        ("PATH", "/opt/tools/bin:$PATH", "$PATH is not expanded, so the value replaces PATH"),
        ("LD_LIBRARY_PATH", "/opt/lib", "it replaces LD_LIBRARY_PATH of AWS's image"),
        ("LD_LIBRARY_PATH", "/opt/lib:${LD_LIBRARY_PATH}", "${LD_LIBRARY_PATH} is not expanded"),
        ("TRAINING_JOB_ARN", "x", "SageMaker sets this variable"),
        ("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "/x", "SageMaker sets this variable"),
        ("TORCHELASTIC_RUN_ID", "x", "the launcher sets this variable"),
        ("OMPI_COMM_WORLD_RANK", "0", "the launcher sets this variable"),
        ("CLOUDTRAIN_MOST_PROCESSES", "1", "the launcher sets this variable"),
        ("ROLE_WORLD_SIZE", "1", "the launcher sets this variable"),
    ],
)
def test_a_variable_of_the_container_is_refused(
    plan_of: PlanOf, name: str, value: str, message: str
) -> None:
    text = SCRIPT_JOB.replace("script: train.py", f"script: train.py, env: {{{name}: '{value}'}}")
    found = refusal(plan_of, text=text)
    assert f"job.yaml:2:32  code.env.{name}: {message}" in found
    assert "; remove it" in found


@pytest.mark.parametrize(
    ("text", "name", "cure"),
    [
        (SCRIPT_JOB, "PATH", 'extend os.environ["PATH"] at the start of the code'),
        (SCRIPT_JOB, "LD_LIBRARY_PATH", "load the library by its path (ctypes.CDLL)"),
        (COMMAND, "PATH", "export PATH=FOLDER:$PATH"),
        (COMMAND, "LD_LIBRARY_PATH", "export LD_LIBRARY_PATH=FOLDER:$LD_LIBRARY_PATH"),
    ],
)
def test_the_cure_fits_the_entry(plan_of: PlanOf, text: str, name: str, cure: str) -> None:
    assert cure in refusal(plan_of, f"code.env.{name}=/opt/tools", text=text)


@pytest.mark.parametrize(
    "changes",
    [
        ["code.env.AWS_PROFILE=team", "code.env.AWS_CONFIG_FILE=aws.ini"],
        ["code.env.AWS_REGION=eu-west-1", "code.env.AWS_MAX_ATTEMPTS=5"],
        [OWN_IMAGE, "code.env.PATH=/opt/conda/bin:/usr/bin:/bin"],
        [OWN_IMAGE, "code.env.LD_LIBRARY_PATH=/opt/lib:/usr/local/cuda/lib64"],
        ["code.env.LD_PRELOAD=/usr/lib/libtcmalloc.so"],
        ["code.env.PYTHONPATH=src:$PYTHONPATH", "code.env.TORCH_NCCL_ASYNC_ERROR_HANDLING=1"],
        ["code.env.NCCL_SOCKET_IFNAME=eth0", "code.env.OMP_NUM_THREADS=8"],
        *([f"code.env.{name}=1"] for name in sorted(SWITCHES)),
    ],
)
def test_other_variables_are_planned(plan_of: PlanOf, changes: list[str]) -> None:
    assert plan_of(*changes, text=SCRIPT_JOB).request["Environment"]


def test_an_image_of_your_own_needs_programs_in_path(plan_of: PlanOf) -> None:
    found = refusal(plan_of, OWN_IMAGE, "code.env.PATH=/opt/conda/bin", text=SCRIPT_JOB)
    assert "it replaces PATH of the container, and has neither /bin nor /usr/bin" in found


def test_a_local_run_has_this_machines_profiles(plan_of: PlanOf) -> None:
    assert plan_of("code.env.AWS_PROFILE=team", text=SCRIPT_JOB, **local())
    assert "is not expanded" in refusal(
        plan_of, "code.env.PATH=/opt/bin:$PATH", text=SCRIPT_JOB, **local()
    )


def test_each_variable_of_the_runtime_is_its_own_or_a_switch() -> None:
    """A new variable belongs to `run_variables`, or to the documented switches above."""
    found = {
        name
        for path in Path(cloudtrain_runtime.__file__).parent.rglob("*.py")
        if "serving" not in path.parts
        for name in re.findall(r"\bCLOUDTRAIN_[A-Z0-9_]+\b", path.read_text())
    }
    set_as_a_job_does = {
        REHEARSAL_FORKS_VARIABLE,
        REHEARSAL_HOLD_VARIABLE,
        REHEARSAL_LAST_VARIABLE,
        REHEARSAL_SAMPLES_VARIABLE,
    }
    free = {name for name in found if not setter_of(name)}
    assert free == SWITCHES | set_as_a_job_does


LONGEST = MAX_STRING_BYTES - 9000
"""An argument whose variables, with the assumed size of SM_TRAINING_ENV, are below the limit."""


@pytest.mark.parametrize(
    ("args", "place", "message"),
    [
        (
            f"{{prompt: {'x' * MAX_STRING_BYTES}}}",
            "code.args.prompt",
            "SM_TRAINING_ENV with code.args has 139,",
        ),
        (
            f"[--prompt, {'x' * MAX_STRING_BYTES}]",
            "code.args[1]",
            "SM_TRAINING_ENV with code.args has 139,",
        ),
        # Six bytes for each letter in JSON.
        (
            f"{{prompt: {'ж' * 25_000}}}",
            "code.args.prompt",
            "SM_TRAINING_ENV with code.args has 158,",
        ),
    ],
    ids=["mapping", "list", "escaped"],
)
def test_more_arguments_than_linux_passes_are_refused(
    plan_of: PlanOf, args: str, place: str, message: str
) -> None:
    text = SCRIPT_JOB.replace("script: train.py", f"script: train.py, args: {args}")
    found = refusal(plan_of, text=text)
    assert f"{place}: {message}" in found
    assert "Linux passes at most 131,072 in one argument or variable; write them to a file" in found
    assert "job.yaml:2:" in found
    assert place in refusal(plan_of, text=text, **local())


def test_long_arguments_within_the_limit_are_planned(plan_of: PlanOf) -> None:
    text = SCRIPT_JOB.replace("script: train.py", f"script: train.py, args: [{'x' * LONGEST}]")
    assert plan_of(text=text).config.args == ["x" * LONGEST]
    # The arguments of a Task travel in run.json alone.
    assert plan_of(f"code.args={{layers: {'9' * 4000}}}")


def test_more_words_than_linux_passes_are_refused(plan_of: PlanOf) -> None:
    word = "x" * MAX_STRING_BYTES
    text = SCRIPT_JOB.replace("script: train.py", f"command: [bash, -c, {word}]")
    assert "code.command[2]: it has 131,073 bytes" in refusal(plan_of, text=text)
    words = f"[bash, {', '.join(['x' * 100_000] * (MAX_TOTAL_BYTES // 100_000))}]"
    found = refusal(plan_of, "code.script=null", f"code.command={words}", text=SCRIPT_JOB)
    assert "Linux passes 2,097,152 to a process" in found


def test_the_limit_is_that_of_this_kernel() -> None:
    fits = argument_variables(["x" * (MAX_STRING_BYTES - len('SM_USER_ARGS=[""]') - 1)], {})
    assert subprocess.run(["/bin/true"], env=fits, check=False).returncode == 0
    longer = argument_variables(["x" * (MAX_STRING_BYTES - len('SM_USER_ARGS=[""]'))], {})
    with pytest.raises(OSError, match="Argument list too long"):
        subprocess.run(["/bin/true"], env=longer, check=False)
