"""Where the product reads what others may have written, and where it listens: found in the source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from support.jobs import REPOSITORY

FOLDERS = ("sdk/cloudtrain", "entrypoints/cloudtrain_runtime")
PARSERS = frozenset(
    {
        "load_json", "json.load", "json.loads", "raw_decode", "yaml.compose", "yaml.load", "yaml.safe_load",
        "tomllib.load", "tomllib.loads", "tarfile.open", "zipfile.ZipFile", "gzip.open", "gzip.decompress",
        "torch.load", "load_plain", "pickle.load", "pickle.loads", "pickle.Unpickler", "marshal.loads", "np.load",
        "Image.open", "safe_open", "csv.reader", "csv.DictReader", "ElementTree.parse", "ElementTree.fromstring",
        "parse_qs", "ast.parse", "sqlite3.connect", "RawConfigParser",
        "parse_queue", "parse_job", "parse_history", "parse_partitions", "parse_nodes", "parse_config",
        "parse_reports",
    }
)  # fmt: skip
"""Calls and base classes that turn bytes into values."""
LISTENERS = frozenset(
    {
        "socket.socket", "socket.create_server", "create_server", "make_server", "run_simple", "HTTPServer",
        "ThreadingHTTPServer", "ThreadedWSGIServer", "uvicorn.run", "uvicorn.Config", "serve.start", "ray.init",
        "TCPStore", "Listener", "start_server", "start_unix_server",
    }
)  # fmt: skip
"""Calls and base classes that open a socket on which this machine can be reached."""


def modules_with(names: frozenset[str]) -> set[str]:
    """Return the paths of the modules that call, or derive a class from, one of these names."""
    return {
        path.relative_to(REPOSITORY).as_posix()
        for folder in FOLDERS
        for path in (REPOSITORY / folder).rglob("*.py")
        if "templates" not in path.parts and names & set(_used(path))
    }


def _used(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            yield from _names(node.func)
            # A function that is passed on, as in map(load_json, lines).
            for argument in node.args:
                yield from _names(argument)
        elif isinstance(node, ast.ClassDef):
            for base in node.bases:
                yield from _names(base)


def _names(node: ast.expr) -> Iterator[str]:
    """Yield the dotted name of an expression and its last two parts and last part."""
    if not isinstance(node, ast.Name | ast.Attribute):
        return
    text = ast.unparse(node)
    parts = text.split(".")
    yield text
    yield ".".join(parts[-2:])
    yield parts[-1]


class Source(NamedTuple):
    """One kind of data from outside.

    Attributes:
        what: What it is.
        writers: Who can write it, besides the user.
        checked: What is checked before it is believed.
        test: The test that shows it, as `file::name`.
        modules: Modules that parse it.
    """

    what: str
    writers: str
    checked: str
    test: str
    modules: tuple[str, ...]


_FUZZED = "tests/unit/test_fuzzed_files.py::test_a_damaged_file_has_the_readers_own_error"
_S, _R = "sdk/cloudtrain", "entrypoints/cloudtrain_runtime"

SOURCES = (
    Source(
        "`job.yaml`, `sweep.yaml`, `--set`, faults of a sandbox",
        "whoever wrote the repository",
        "at most 1 MiB, no aliases and tags; each field by its type; secrets are refused",
        _FUZZED,
        (
            f"{_S}/job/document.py",
            f"{_S}/job/schema.py",
            f"{_S}/backends/sandbox/fault_injection.py",
        ),
    ),
    Source(
        "Python and shell sources of the job",
        "whoever wrote the repository",
        "read, not imported; what cannot be parsed gives no finding",
        "tests/unit/test_fuzzed_files.py::test_a_source_that_cannot_be_parsed_gives_no_finding",
        (
            f"{_R}/contract/python_source.py",
            f"{_R}/process/fresh_import.py",
            f"{_S}/features/functions/cells.py",
            f"{_S}/features/functions/local_modules.py",
            f"{_S}/features/setup/new_job.py",
        ),
    ),
    Source(
        "a notebook's file, in place of a job file",
        "whoever wrote it",
        "at most 52 MB, JSON of the form; cells are parsed, not executed",
        "tests/unit/test_notebook_code.py::test_a_damaged_notebook_is_an_error",
        (f"{_S}/features/functions/notebook_file.py",),
    ),
    Source(
        "what a fresh Python says of a notebook's module that it has imported",
        "the notebook's code, which it has executed",
        "an answer that is not complete is a failure of the code",
        "tests/unit/test_notebook_state.py::test_code_that_ends_its_process_is_refused",
        (f"{_S}/features/functions/comparison.py",),
    ),
    Source(
        "the value that a job's function has returned",
        "the job's code",
        "JSON of known forms, plain numbers, NumPy without pickle",
        "tests/unit/test_returned_values.py::test_damaged_files_are_an_error",
        (f"{_R}/contract/returned_values.py",),
    ),
    Source(
        "`cloudtrain.toml`, the profile file",
        "whoever wrote the repository; nobody",
        "each setting by its type; account settings of a repository need an agreement",
        "tests/commands/test_trust.py::test_the_answer_counts_for_one_file_and_its_values",
        (f"{_S}/settings/toml_file.py",),
    ),
    Source(
        "the region in AWS's configuration files",
        "nobody",
        "at most 1 MB; a file that cannot be parsed gives no region",
        "tests/unit/test_credential_errors.py::test_a_file_without_a_usable_region_hinders_nothing",
        (f"{_S}/settings/aws_profile.py",),
    ),
    Source(
        "records in the configuration folder: agreements, homes, runs, endpoints; prices",
        "nobody",
        "damaged lines are skipped; damaged agreements ask again",
        _FUZZED,
        (
            f"{_S}/settings/trust.py",
            f"{_S}/support/records.py",
            f"{_S}/catalog/prices.py",
        ),
    ),
    Source(
        "files of a run in the home: state, plan, request, results of evaluations",
        "the job's code; who can write to the home",
        "a home that nobody else can write to and that the user made; regular files of at most 64 MiB; each field by its type",
        "tests/unit/test_home_owners.py::test_a_folder_that_was_cloned_is_not_used",
        (
            f"{_S}/runs/run_files.py",
            f"{_S}/runs/evaluations.py",
            f"{_S}/backends/container/state_file.py",
            f"{_S}/backends/container/event_tail.py",
            f"{_S}/backends/container/ml_paths.py",
            f"{_S}/backends/container/run_folders.py",
            f"{_S}/backends/container/supervision.py",
            f"{_S}/backends/slurm/attempts.py",
            f"{_S}/backends/slurm/host_step.py",
            f"{_S}/backends/slurm/run_files.py",
        ),
    ),
    Source(
        "events and other lines of a run's log",
        "the job's code",
        "each field by its schema; a line is never more than text",
        "tests/unit/test_fuzzed_logs.py::test_no_fuzzed_log_breaks_a_reader",
        (
            f"{_R}/contract/events.py",
            f"{_S}/features/rehearsal/runs.py",
            f"{_S}/runs/event_words.py",
        ),
    ),
    Source(
        "cached bundles, environments and digests",
        "who can write to the home",
        "the same home; a bundle is compared with the code before it is sent",
        "tests/unit/test_bundle.py::test_a_planted_archive_is_rewritten",
        (
            f"{_S}/bundle/archive.py",
            f"{_S}/bundle/digests.py",
            f"{_S}/backends/container/environments.py",
        ),
    ),
    Source(
        "receipts of rehearsals, in the home and beside the job",
        "whoever wrote the repository",
        "at most 64 KiB; digest of code and request",
        _FUZZED,
        (f"{_S}/client/receipts.py",),
    ),
    Source(
        "sweeps: `sweep.json`, Optuna's database, their copies in S3",
        "who can write to the home; who can write to the bucket",
        "the sweep's document as a sweep file; the identity of the sweep",
        _FUZZED,
        (
            f"{_S}/controllers/kept_code.py",
            f"{_S}/features/sweeps/stored_sweep.py",
            f"{_S}/features/sweeps/trial.py",
            f"{_S}/features/sweeps/tuning_engine.py",
        ),
    ),
    Source(
        "runs of several attempts: `chain.json`, `job.json`, their copies in S3",
        "who can write to the home; who can write to the bucket",
        "ids of runs, finite times and amounts; the job as a job file",
        "tests/unit/test_chains.py::test_a_damaged_record_hides_no_run",
        (f"{_S}/runs/attempt_chain.py", f"{_S}/features/recovery/service.py"),
    ),
    Source(
        "archives: bundles, models, outputs",
        "the job's code; who can write to the bucket",
        "regular files below the folder; `download --unpack` at most 1 GiB or a hundred times the archive",
        "tests/sagemaker/test_downloads.py::test_hostile_archives_are_kept_packed",
        (
            f"{_S}/bundle/unpacking.py",
            f"{_S}/runs/downloads.py",
            f"{_S}/backends/container/filesystem.py",
        ),
    ),
    Source(
        "checkpoints: manifests, lists of trainers, metadata, entries, weights to start with",
        "the job's code; who can write to the bucket",
        "checksums; no code is run; no more memory than the file's length explains",
        "tests/runtime/test_safe_metadata.py::test_invalid_metadata_is_rejected",
        (
            f"{_R}/contract/manifest.py",
            f"{_R}/contract/checkpoint_folder.py",
            f"{_R}/checkpoint/safe_metadata.py",
            f"{_R}/checkpoint/initial_weights.py",
            f"{_S}/features/rehearsal/script_files.py",
        ),
    ),
    Source(
        "plans and locks in S3",
        "who can write to the bucket; not a job with the role of `infra/`",
        "the bucket's owner; an object is a JSON object with fields of their types",
        "tests/sandbox/test_bucket_owners.py::test_every_request_of_client_and_container_names_the_owner",
        (
            f"{_S}/backends/sagemaker/stored_plans.py",
            f"{_S}/aws/s3_lock.py",
            f"{_S}/aws/s3_objects.py",
        ),
    ),
    Source(
        "answers of AWS, outputs of Terraform",
        "AWS; nobody",
        "TLS by AWS's clients; an answer that is not as documented is an error or unknown",
        _FUZZED,
        (
            f"{_S}/preflight/role.py",
            f"{_S}/preflight/prices.py",
            f"{_S}/features/serving/deployment.py",
            f"{_S}/features/setup/terraform_outputs.py",
            f"{_S}/backends/sagemaker/estimator.py",
        ),
    ),
    Source(
        "output of Slurm's commands: jobs, partitions, nodes",
        "Slurm; users of the cluster, who choose names and comments of their jobs",
        "separators that no name contains; fields of their own lines; numbers and times by their form",
        "tests/unit/test_slurm_output.py::test_no_damaged_output_breaks_a_parser",
        (f"{_S}/backends/slurm/commands.py", f"{_S}/backends/slurm/node_ping.py"),
    ),
    Source(
        "`run.json`, `serving.json`, hyperparameters of a trial, variables of the container",
        "the client; not a job with the role of `infra/`",
        "version and fields; values of a trial by the job's fields",
        _FUZZED,
        (
            f"{_R}/contract/run_config.py",
            f"{_R}/contract/serving_config.py",
            f"{_R}/contract/trial.py",
            f"{_R}/contract/argument_variables.py",
            f"{_R}/contract/bucket_owner.py",
            f"{_R}/process/environment.py",
            f"{_R}/process/run_context.py",
            f"{_R}/launch.py",
            f"{_R}/launcher/sagemaker_environment.py",
            f"{_R}/launcher/toolkit.py",
            f"{_R}/metrics/tracking/tracker.py",
        ),
    ),
    Source(
        "the state of offline files of Weights & Biases",
        "who can write the folder of the run",
        "fields and their types; a damaged one is an error of the tracker alone",
        "tests/runtime/test_offline_files.py::test_a_damaged_state_is_an_error",
        (f"{_R}/metrics/tracking/offline_files.py",),
    ),
    Source(
        "secrets, by AWS's Secrets Manager",
        "who can write the secret",
        "a text or a JSON object with the key that the job names",
        "tests/local/test_secrets.py::test_only_ranks_have_the_secrets",
        (f"{_R}/launcher/secrets.py", f"{_R}/contract/redaction.py"),
    ),
    Source(
        "requests to a served model",
        "on loopback every user of the machine; on SageMaker who may invoke the endpoint",
        "6 MB, 30 seconds, a bound on all requests together; JSON, arrays without pickle, images",
        "tests/runtime/test_predictions.py::test_no_array_ends_the_server",
        (f"{_R}/serving/payloads.py",),
    ),
    Source(
        "requests to the sandbox",
        "who has its key",
        "key, Host, Origin; the request by AWS's model",
        "tests/sandbox/test_access.py::test_a_request_without_the_key_is_rejected",
        (
            f"{_S}/backends/sandbox/access.py",
            f"{_S}/backends/sandbox/http_frontend.py",
            f"{_S}/backends/sandbox/resources.py",
            f"{_S}/backends/sandbox/batch_queues.py",
            f"{_S}/backends/sandbox/attempt.py",
            f"{_S}/backends/sandbox/job_runner.py",
            f"{_S}/backends/sandbox/process.py",
        ),
    ),
    Source(
        "files of samples",
        "who can write the data",
        "read by the user's own function; the channel's configuration by SageMaker",
        "tests/runtime/test_streams.py::test_files_are_used_exactly_once_by_any_ranks_and_workers",
        (f"{_R}/data/file_stream.py",),
    ),
)
"""Data from outside, and who may have written it."""

OWN = {
    f"{_R}/contract/strict_json.py": "the reader itself",
    f"{_R}/launcher/fork_server.py": "requests of the parent process, answers of a child process, through a pipe",
    f"{_R}/launcher/rank_processes.py": "what a rank has written; only its message is used, as any JSON (agent.py)",
    f"{_R}/launcher/shared_forks.py": "requests of agents of the same rehearsal, at a socket in a private folder",
    f"{_S}/backends/container/model_server.py": "a line of a child process",
    f"{_S}/catalog/service_limits.py": "botocore's model, and a copy of it in the user's cache folder",
    f"{_S}/catalog/source.py": "files of the package",
    f"{_S}/features/setup/machine_report.py": "a line of a child process",
    f"{_S}/job/job_text.py": "what this process has written",
    f"{_S}/planning/plan.py": "what this process has written",
    f"{_S}/planning/request_limits.py": "what this process has written",
    f"{_S}/planning/run_config.py": "what this process has written",
    f"{_S}/preflight/secrets.py": "a line of a child process",
    f"{_S}/features/rehearsal/comparing.py": "a line of a child process",
    f"{_S}/features/rehearsal/rank_memory.py": "a line of a child process",
    f"{_S}/features/rehearsal/starting.py": "what pip has printed",
    f"{_S}/runs/checkpoints.py": "a line of a child process",
    f"{_S}/runs/comparison.py": "what this process has written",
    f"{_S}/features/serving/package.py": "an archive that this process writes",
    f"{_S}/support/installation.py": "what the installer has recorded beside the package",
    f"{_S}/features/sweeps/planning.py": "what this process has written",
}
"""Modules that parse only what cloudtrain or a program of its choice has written, and what that is."""

SOCKETS = {
    f"{_R}/launcher/agent.py": "torchrun's store of several hosts; its state is signed",
    f"{_R}/launcher/shared_forks.py": "the forks of a rehearsal, a Unix socket in a private folder",
    f"{_R}/launcher/loopback_store.py": "the ranks' store, on loopback where all hosts are on this machine",
    f"{_R}/launcher/rendezvous.py": "torchrun's store of several hosts; its state is signed",
    f"{_R}/process/reserved_port.py": "holds a port of the ranks' store and accepts no connection",
    f"{_R}/serving/replica_process.py": "its end of a pair of sockets, which no other process can open",
    f"{_R}/serving/server.py": "a served model, on loopback",
    f"{_S}/backends/container/machine.py": "tries whether a port is free, and closes it",
    f"{_S}/backends/container/model_server.py": "tries whether a port is free, and closes it",
    f"{_S}/backends/slurm/hosts.py": "asks which own address leads to another node, and sends nothing",
    f"{_S}/backends/sandbox/server.py": "the sandbox, on loopback with a key",
    f"{_S}/features/dashboard/server.py": "the dashboard, on loopback with a token",
}
"""Modules that open a socket, and what it is."""


def sources_table() -> str:
    """Return the table of data from outside, in Markdown."""
    rows = [
        f"| {each.what} | {each.writers} | {each.checked} | `{each.test}` |" for each in SOURCES
    ]
    head = ["| data | who else can write it | what is checked | test |", "|---|---|---|---|"]
    return "\n".join([*head, *rows])


def modules_table() -> str:
    """Return the modules of each kind of data, of cloudtrain's own, and of sockets, in Markdown."""
    read = [f"| `{name}` | {each.what} |" for each in SOURCES for name in each.modules]
    own = [f"| `{name}` | {what} |" for name, what in OWN.items()]
    sockets = [f"| `{name}` | {what} |" for name, what in SOCKETS.items()]
    return "\n".join(
        [
            *("| module | reads |", "|---|---|", *read, ""),
            *("| module | reads what cloudtrain has made |", "|---|---|", *own, ""),
            *("| module | opens a socket |", "|---|---|", *sockets),
        ]
    )
