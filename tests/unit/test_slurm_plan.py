"""Plans for Slurm: options of sbatch and their origins, the batch script, checks, identity; other plans stay equal."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.plans import SCRIPT_JOB, SETTINGS, TASK_JOB, PlanOf, local, refusal

from cloudtrain.backends.context import BackendContext
from cloudtrain.backends.registry import backend_package
from cloudtrain.backends.slurm.batch_request import exported_names
from cloudtrain.backends.slurm.target import SlurmTarget
from cloudtrain.catalog import bundled_prices
from cloudtrain.client.client import Client
from cloudtrain.client.planning_inputs import check_job
from cloudtrain.console.plans import print_plan
from cloudtrain.errors import SpecError, UserError
from cloudtrain.job.spec import JobSpec, load_job
from cloudtrain.planning.batch_job import BatchJob
from cloudtrain.settings.settings import Settings
from cloudtrain.settings.slurm_sites import SlurmSite
from cloudtrain.support import backend_facts
from cloudtrain.support.backend_facts import BACKENDS, BackendFacts, facts_of, place_name

SITE = SlurmSite(
    name="main",
    folder=Path("/fsx/cloudtrain"),
    partition="gpu",
    account="vision",
    gpus_per_node=8,
    setup=("module load cuda",),
    python="/fsx/env/bin/python",
    sbatch=("--constraint=a100", "--nice"),
    origin="cloudtrain.toml:1",
    origins={"partition": "cloudtrain.toml:3", "sbatch": "cloudtrain.toml:7"},
)
JOB = TASK_JOB.replace("instance_type: ml.p4d.24xlarge, ", "")
RUN = "demo-261120-101500-1a2b3c"
FOLDER = f"/fsx/cloudtrain/runs/{RUN}"


def on_slurm(
    site: SlurmSite = SITE, exported: tuple[str, ...] = ("HOME", "PATH")
) -> dict[str, Any]:
    target = SlurmTarget(SETTINGS, site, this_python="/usr/bin/python3", exported=exported)
    return {"target": target, "text": JOB}


def options_of(
    plan_of: PlanOf, *overrides: str, **arguments: Any
) -> dict[str, tuple[str | None, str]]:
    batch_job = plan_of(*overrides, **(arguments or on_slurm())).batch_job
    assert batch_job is not None
    return {each.name: (each.value, each.origin) for each in batch_job.options}


def test_each_option_has_its_origin(plan_of: PlanOf) -> None:
    plan = plan_of(**on_slurm())
    assert options_of(plan_of) == {
        "--parsable": (None, "cloudtrain"),
        "--job-name": (RUN, "name"),
        "--comment": (f"cloudtrain:{plan.identity}", "cloudtrain"),
        "--nodes": ("2", "cluster.instances"),
        "--ntasks-per-node": ("1", "cloudtrain"),
        "--gpus-per-node": ("8", "cloudtrain.toml:1"),
        "--exclusive": (None, "cloudtrain"),
        "--requeue": (None, "cloudtrain"),
        "--open-mode": ("append", "cloudtrain"),
        "--output": (f"{FOLDER}/slurm.log", "cloudtrain.toml:1"),
        "--chdir": (FOLDER, "cloudtrain.toml:1"),
        "--export": ("HOME,PATH", "cloudtrain"),
        "--time": ("1445", "limits.runtime"),
        "--signal": ("B:USR1@180", "cloudtrain"),
        "--partition": ("gpu", "cloudtrain.toml:3"),
        "--account": ("vision", "cloudtrain.toml:1"),
        "--constraint": ("a100", "cloudtrain.toml:7"),
        "--nice": (None, "cloudtrain.toml:7"),
    }


def test_the_script_is_complete(plan_of: PlanOf) -> None:
    batch_job = plan_of(**on_slurm()).batch_job
    assert batch_job is not None
    assert batch_job.script == (
        "#!/bin/bash\n"
        "# The batch step of a cloudtrain run: it starts one host of the run on each node, and supervises them.\n"
        "trap '' USR1 USR2\n"
        "set -e\n"
        "module load cuda\n"
        f"exec /fsx/env/bin/python -P -m cloudtrain.backends.slurm.batch_step {FOLDER}\n"
    )


def test_the_script_quotes_paths(plan_of: PlanOf) -> None:
    site = replace(SITE, folder=Path("/fsx/my runs%"), python=None)
    batch_job = plan_of(**on_slurm(site)).batch_job
    assert batch_job is not None
    assert "exec /usr/bin/python3 -P -m" in batch_job.script
    assert f"'/fsx/my runs%/runs/{RUN}'" in batch_job.script
    assert f"--output=/fsx/my runs%%/runs/{RUN}/slurm.log" in batch_job.arguments


def test_the_job_has_precedence_over_the_site(plan_of: PlanOf) -> None:
    options = options_of(
        plan_of,
        "slurm={partition: debug, qos: high, reservation: course, sbatch: [--constraint=h100, '--mem=0']}",
    )
    assert options["--partition"] == ("debug", "slurm.partition")
    assert options["--qos"] == ("high", "slurm.qos")
    assert options["--reservation"] == ("course", "slurm.reservation")
    assert options["--constraint"] == ("h100", "slurm.sbatch")
    assert options["--mem"] == ("0", "slurm.sbatch")
    assert options["--account"] == ("vision", "cloudtrain.toml:1")


@pytest.mark.parametrize(
    ("given", "replaced"),
    [
        ("--no-requeue", "--requeue"),
        ("--oversubscribe", "--exclusive"),
        ("--gres=gpu:4", "--gpus-per-node"),
    ],
)
def test_an_option_replaces_its_opposite(plan_of: PlanOf, given: str, replaced: str) -> None:
    options = options_of(plan_of, f"slurm.sbatch=['{given}']")
    assert given.partition("=")[0] in options
    assert replaced not in options


def test_a_shorter_limit_of_the_site_is_a_chain(plan_of: PlanOf) -> None:
    site = replace(SITE, time_seconds=4 * 3600, origins={"time": "cloudtrain.toml:5"})
    plan = plan_of(**on_slurm(site))
    assert options_of(plan_of, **on_slurm(site))["--time"] == ("240", "cloudtrain.toml:5")
    assert plan.max_runtime_seconds == 86400
    assert any("ends after 4h" in text and "is queued again" in text for text in plan.decisions)


@pytest.mark.parametrize(("gpus", "ranks", "backend"), [(8, 8, "nccl"), (0, 2, "gloo")])
def test_ranks_are_those_of_a_node(plan_of: PlanOf, gpus: int, ranks: int, backend: str) -> None:
    plan = plan_of(**on_slurm(replace(SITE, gpus_per_node=gpus)))
    assert plan.cluster.instance_type == ""
    assert plan.cluster.processes_per_instance == ranks
    assert (plan.cluster.world_size, plan.cluster.backend) == (2 * ranks, backend)
    assert plan.request["ResourceConfig"] == {"InstanceCount": 2, "VolumeSizeInGB": 30}
    assert (
        "--gpus-per-node" in options_of(plan_of, **on_slurm(replace(SITE, gpus_per_node=gpus)))
    ) == bool(gpus)


def test_files_are_below_the_folder_of_the_site(plan_of: PlanOf) -> None:
    locations = plan_of(**on_slurm()).locations
    assert locations.config == f"file://{FOLDER}/config"
    assert locations.checkpoints == f"file://{FOLDER}/checkpoints"
    assert locations.code == f"file:///fsx/cloudtrain/bundles/{'d' * 64}/sourcedir.tar.gz"


def test_a_type_of_instance_is_ignored(plan_of: PlanOf) -> None:
    with_type = plan_of("cluster.instance_type=ml.trn1.32xlarge", **on_slurm())
    assert with_type.identity == plan_of(**on_slurm()).identity
    assert with_type.job_document["cluster"]["instance_type"] == "ml.trn1.32xlarge"


@pytest.mark.parametrize(
    "changed",
    [
        "slurm.partition=debug",
        "slurm.sbatch=['--mem=0']",
        "cluster.instances=3",
        "limits.runtime=1h",
    ],
)
def test_the_identity_follows_the_jobs_options(plan_of: PlanOf, changed: str) -> None:
    assert plan_of(changed, **on_slurm()).identity != plan_of(**on_slurm()).identity


@pytest.mark.parametrize(
    "site",
    [
        replace(SITE, setup=()),
        replace(SITE, python="/other/python"),
        replace(SITE, qos="high"),
        replace(SITE, sbatch=()),
        replace(SITE, folder=Path("/other")),
    ],
)
def test_the_identity_follows_the_site(plan_of: PlanOf, site: SlurmSite) -> None:
    assert plan_of(**on_slurm(site)).identity != plan_of(**on_slurm()).identity


def test_the_identity_is_equal_on_each_login_node(plan_of: PlanOf) -> None:
    elsewhere = replace(SITE, origin="/home/me/cloudtrain.toml:9", origins={})
    other = plan_of(**on_slurm(elsewhere, exported=("AWS_PROFILE", "HOME")))
    assert other.identity == plan_of(**on_slurm()).identity


def test_runs_of_one_second_have_different_ids(plan_of: PlanOf) -> None:
    identity = plan_of(**on_slurm()).identity
    target = on_slurm()["target"]
    assert len({target.run_suffix(identity) for _ in range(8)}) == 8


def test_a_plan_is_renamed_everywhere(plan_of: PlanOf) -> None:
    plan = plan_of(**on_slurm())
    renamed = plan.rename("demo-261120-101500-ffffff")
    assert RUN not in renamed.to_file()
    assert renamed.rename(RUN) == plan


def test_the_batch_job_is_read_from_plan_json(plan_of: PlanOf) -> None:
    plan = plan_of("slurm.sbatch=['--export=A=b,C']", **on_slurm())
    stored = json.loads(plan.to_file())["batch_job"]
    assert BatchJob.from_document(stored) == plan.batch_job
    assert stored["site"] == "main"
    assert stored["origins"]["--export"] == "slurm.sbatch"
    assert plan.to_json()["batch_job"] == stored


def test_other_plans_have_no_batch_job(plan_of: PlanOf) -> None:
    for arguments in ({}, local()):
        plan = plan_of(**arguments)
        assert plan.batch_job is None
        assert "batch_job" not in plan.to_json()


@pytest.mark.parametrize("arguments", [{}, local()])
def test_other_places_ignore_the_section(plan_of: PlanOf, arguments: dict[str, Any]) -> None:
    without = plan_of(**arguments)
    given = plan_of("slurm={partition: gpu, sbatch: [--mem=0]}", **arguments)
    assert given.identity == without.identity
    assert given.warnings == without.warnings
    assert given.request == without.request


def test_fields_without_a_meaning_are_named(plan_of: PlanOf) -> None:
    fields = ["cluster.spot=true", "cluster.queue=q", "cluster.volume=50GB"]
    plan = plan_of(*fields, "output.uri=s3://bucket/x", **on_slurm())
    assert (
        "cluster.spot, cluster.volume, cluster.queue and output.uri are ignored: they are for SageMaker, and this run "
        "is on Slurm"
    ) in plan.warnings
    assert plan.max_wait_seconds is None
    one = plan_of("cluster.remote_debug=true", **on_slurm())
    assert (
        "cluster.remote_debug is ignored: it is for SageMaker, and this run is on Slurm"
        in one.warnings
    )


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (
            "data={train: {fsx: fs-0123456789abcdef0, path: /fsx/a}}",
            "a run on Slurm cannot mount a file system",
        ),
        ("slurm.sbatch=['--nodes=2']", "cloudtrain gives --nodes itself; use cluster.instances"),
        ("slurm.sbatch=['--arra=0-1']", "cloudtrain gives --array itself; one job is one run"),
        ("slurm.sbatch=['-p gpu']", "write --partition=VALUE"),
        ("slurm.partition='a b'", "slurm.partition: expected a name without spaces"),
        ("slurm.partiton=gpu", 'slurm.partiton: unknown field; did you mean "partition"?'),
        ("slurm=gpu", "write slurm: {partition: gpu}"),
    ],
)
def test_mistakes_of_a_job_are_named(plan_of: PlanOf, override: str, expected: str) -> None:
    assert expected in refusal(plan_of, override, **on_slurm())


def test_a_price_per_node_hour_bounds_the_run(plan_of: PlanOf) -> None:
    priced = on_slurm(replace(SITE, usd_per_node_hour=10.0))
    plan = plan_of("limits.runtime=2h", **priced)
    assert (plan.cost.usd_per_hour, plan.cost.max_usd) == (20.0, 40.0)
    shortened = plan_of("limits.cost=40 USD", **priced)
    assert shortened.max_runtime_seconds == 7200
    message = refusal(plan_of, "limits.cost=40 USD", "limits.runtime=3h", **priced)
    assert "40 USD pays for 2h of 20.00 USD per hour; limits.runtime is 3h" in message
    unpriced = plan_of("limits.cost=40 USD", **on_slurm())
    assert any(text.startswith("limits.cost limits nothing") for text in unpriced.warnings)
    assert unpriced.cost.max_usd == 0.0


def test_a_job_needs_a_type_of_instance_elsewhere(job: Any) -> None:
    path = job("name: demo\ncode: {script: train.py}\ncluster:\n  spot: maybe\n  instances: 2\n")
    (path.parent / "train.py").write_text("")
    client = Client(Settings(slurm={"main": SITE}))
    for backend in ("sagemaker", "local"):
        with pytest.raises(SpecError) as caught:
            client.validate(path, backend=backend)
        found = [str(problem) for problem in caught.value.problems]
        assert any("cluster.spot: expected true" in text for text in found)
        assert any(
            "job.yaml:4:3  cluster: give exactly one of instance_type and prefer" in text
            for text in found
        )
    path.write_text(path.read_text().replace("  spot: maybe\n", ""))
    assert client.validate(path, backend="slurm").cluster.types == ()


def test_two_ways_to_name_a_type_stay_an_error(job: Any) -> None:
    path = job(SCRIPT_JOB, train_py="")
    with pytest.raises(SpecError, match="give exactly one of instance_type and prefer"):
        JobSpec.from_yaml(path, ["cluster.prefer=[ml.p4d.24xlarge]"])
    assert load_job(path, ["cluster.instance_type=null"]).problems == ()


def test_people_see_options_and_script(plan_of: PlanOf, capsys: pytest.CaptureFixture[str]) -> None:
    print_plan(plan_of(**on_slurm()))
    shown = capsys.readouterr().out
    for text in (
        "2 instances on Slurm (main), 8 ranks each",
        "--nodes=2  (cluster.instances)",
        "--partition=gpu  (cloudtrain.toml:3)",
        "module load cuda",
    ):
        assert text in shown
    assert "this machine" not in shown


def test_the_facts_of_slurm_have_their_words() -> None:
    assert place_name("slurm") == "on Slurm"
    assert place_name("sagemaker") == "on SageMaker"
    assert place_name("local") == "on this machine"
    assert not facts_of("slurm").is_local


def test_a_site_is_for_slurm_only(job: Any) -> None:
    path = job(SCRIPT_JOB, train_py="")
    client = Client(Settings(slurm={"main": SITE}))
    with pytest.raises(UserError, match="local has no sites, and 'main' was given"):
        client.plan(path, backend="local", site="main")
    plan = client.plan(path, backend="slurm", site="main")
    assert plan.batch_job is not None
    assert plan.batch_job.site == "main"
    with pytest.raises(UserError, match="--cuda-on-cpu is for local runs, not for slurm"):
        client.plan(path, backend="slurm", cuda_on_cpu=True)


def test_a_missing_package_of_a_backend_is_no_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = BackendFacts("gone", "no_such_package", "--backend gone", False, True, False)
    monkeypatch.setitem(BACKENDS, "gone", facts)
    assert backend_facts.facts_of("gone") is facts
    with pytest.raises(UserError, match=r"the backend gone cannot be used.*no_such_package"):
        backend_package("gone")


def test_without_sites_there_are_no_backends(tmp_path: Path) -> None:
    context = BackendContext(tmp_path, Settings, bundled_prices)
    assert list(backend_package("slurm").find_backends(context)) == []


def test_a_run_gets_named_variables_only() -> None:
    environ = {
        "HOME": "/home/me",
        "PATH": "/bin",
        "TMPDIR": "/scratch/login",
        "AWS_PROFILE": "team",
        "SECRET": "x",
        "MINE": "y",
        "BASH_FUNC_module%%": "()",
        "CLOUDTRAIN_PASS_ENVIRONMENT": "MINE, OTHER",
        "CLOUDTRAIN_HOME": "/home/me/.cloudtrain",
    }
    assert exported_names(environ) == (
        "AWS_PROFILE",
        "CLOUDTRAIN_PASS_ENVIRONMENT",
        "HOME",
        "MINE",
        "PATH",
    )


def test_ranks_that_share_a_gpu_of_a_node_use_gloo(plan_of: PlanOf) -> None:
    plan = plan_of("cluster.processes_per_instance=16", **on_slurm())
    assert plan.cluster.backend == "gloo"
    assert any(text.startswith("16 ranks share 8 GPUs of a node") for text in plan.warnings)
    fewer = plan_of("cluster.processes_per_instance=4", **on_slurm())
    assert "cluster.processes_per_instance: 4 of the 8 GPUs of a node are used" in fewer.warnings


def test_an_untrusted_site_is_named_in_the_plan(plan_of: PlanOf) -> None:
    site = replace(SITE, file="/repo/cloudtrain.toml", is_beside_job=True, is_trusted=False)
    plan = plan_of(**on_slurm(site))
    assert any(text.startswith("slurm.main: from /repo/cloudtrain.toml") for text in plan.warnings)
    (beside,) = plan.settings_beside_job
    assert (beside.name, beside.line) == ("slurm.main", 1)


def test_a_job_without_a_type_is_checked_completely(job: Any) -> None:
    loaded = load_job(
        job(JOB, mine_py="class Mine(Task):\n    def __init__(self, depth=2): ...\n"),
        ["train.epochs=three"],
    )
    client = Client(Settings(slurm={"main": SITE}))
    with pytest.raises(SpecError) as caught:
        check_job(loaded, client.session.offline_inputs(loaded, "slurm"))
    assert [problem.path for problem in caught.value.problems] == [
        "code.args.layers",
        "train.epochs",
    ]
