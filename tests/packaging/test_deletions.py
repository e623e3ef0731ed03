"""Each module that deletes or replaces files says here why these are cloudtrain's own: a new one needs a reason, too."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

pytestmark = pytest.mark.promise

ROOT = Path(__file__).parents[2]
CALLS = {
    *("rmtree", "unlink", "rmdir", "removedirs", "rename", "renames", "move"),
    *("write_atomically", "write_text", "write_bytes", "copyfile", "copy2"),
}
RUN = "in the folder of a run, whose name is unique"
TREE = "in the container's own /opt/ml, or in its copy of the code"
HOME = "in a folder of the home with a name of its own"
NEW = "in a new folder of this process"
NO_FILE = "no file: a plan, or a class of a library, gets another name"
REASONS = {
    "sdk/cloudtrain/backends/container/channel_copies.py": "layers of an overlay, in the folder of a run",
    "sdk/cloudtrain/backends/container/event_tail.py": RUN,
    "sdk/cloudtrain/backends/container/filesystem.py": RUN,
    "sdk/cloudtrain/backends/container/folder_sync.py": "a host's new files; as SageMaker does in S3",
    "sdk/cloudtrain/backends/container/host_launcher.py": RUN,
    "sdk/cloudtrain/backends/container/ml_paths.py": TREE,
    "sdk/cloudtrain/backends/container/mount_namespace.py": "an empty folder, in the folder of a run",
    "sdk/cloudtrain/backends/container/run_folders.py": RUN,
    "sdk/cloudtrain/backends/container/state_file.py": RUN,
    "sdk/cloudtrain/backends/container/supervision.py": RUN,
    "sdk/cloudtrain/backends/container/environments.py": HOME,
    "sdk/cloudtrain/backends/sagemaker/backend.py": NO_FILE,
    "sdk/cloudtrain/backends/sandbox/attempt.py": RUN,
    "sdk/cloudtrain/backends/sandbox/endpoint_runner.py": "a claimed folder (test_own_files.py)",
    "sdk/cloudtrain/backends/sandbox/job_runner.py": "in a claimed folder (test_own_files.py)",
    "sdk/cloudtrain/backends/sandbox/own_folders.py": "a marked folder (test_own_files.py)",
    "sdk/cloudtrain/backends/sandbox/process.py": "its state file, after a check (test_own_files.py)",
    "sdk/cloudtrain/backends/sandbox/server.py": "its state file, after a check (test_own_files.py)",
    "sdk/cloudtrain/backends/slurm/attempts.py": RUN,
    "sdk/cloudtrain/backends/slurm/backend.py": RUN,
    "sdk/cloudtrain/backends/slurm/batch_step.py": RUN,
    "sdk/cloudtrain/backends/slurm/checks.py": "files with a random name that it and two nodes have made",
    "sdk/cloudtrain/backends/slurm/host_step.py": RUN,
    "sdk/cloudtrain/backends/slurm/run_files.py": RUN,
    "sdk/cloudtrain/bundle/archive.py": "a name from tempfile, then that of its digest",
    "sdk/cloudtrain/bundle/digests.py": HOME,
    "sdk/cloudtrain/catalog/service_limits.py": "in the user's cache folder, with a name of its own",
    "sdk/cloudtrain/features/dashboard/commands.py": "card -o refuses a file that exists (test_model_cards.py)",
    "sdk/cloudtrain/features/evaluation/evaluating.py": HOME,
    "sdk/cloudtrain/client/removal.py": "rm deletes runs that have a state file (test_rm.py)",
    "sdk/cloudtrain/client/submission.py": NO_FILE,
    "sdk/cloudtrain/features/dashboard/browser.py": NEW,
    "sdk/cloudtrain/features/dashboard/report.py": "a report has a mark (test_own_files.py)",
    "sdk/cloudtrain/preflight/prices.py": "in the user's configuration, with a name of its own",
    "sdk/cloudtrain/features/rehearsal/memory.py": NEW,
    "sdk/cloudtrain/client/receipts.py": "refuses a file that is no receipt (test_receipts.py)",
    "sdk/cloudtrain/features/rehearsal/shared_imports.py": NEW,
    "sdk/cloudtrain/features/rehearsal/starting.py": NEW,
    "sdk/cloudtrain/features/rehearsal/workspace.py": "a rehearsal has a lock file (test_workspace.py)",
    "sdk/cloudtrain/runs/file_transfer.py": "a download has marks (test_downloads.py)",
    "sdk/cloudtrain/runs/saved_model.py": NEW,
    "sdk/cloudtrain/features/serving/hugging_face.py": NEW,
    "sdk/cloudtrain/features/serving/package.py": NEW,
    "sdk/cloudtrain/settings/profiles.py": "edits a value of the user's file, which it has read",
    "sdk/cloudtrain/settings/trust.py": "in the user's configuration, with a name of its own",
    "sdk/cloudtrain/support/known_homes.py": "an id that the user has not agreed to is replaced",
    "sdk/cloudtrain/support/atomic_write.py": "the name has this process and thread",
    "sdk/cloudtrain/features/functions/job_of.py": "a folder that is new or empty, and one named by a digest",
    "entrypoints/cloudtrain_runtime/contract/returned_values.py": "in the container's own output folder",
    "sdk/cloudtrain/features/recovery/service.py": "in the folder of a chain, whose name is unique",
    "sdk/cloudtrain/features/recovery/stored_chain.py": "in the folder of a chain, whose name is unique",
    "sdk/cloudtrain/features/sweeps/handle.py": "in the folder of a sweep, whose name is unique",
    "sdk/cloudtrain/controllers/kept_code.py": "in the folder of a sweep, whose name is unique",
    "sdk/cloudtrain/features/sweeps/controller_engine.py": "in the folder of a sweep, whose name is unique",
    "sdk/cloudtrain/controllers/shared_folder.py": "in the folder of a sweep, whose name is unique",
    "sdk/cloudtrain/features/sweeps/stored_sweep.py": "in the folder of a sweep, whose name is unique",
    "sdk/cloudtrain/features/sweeps/study.py": "in the folder of a sweep, whose name is unique",
    "sdk/cloudtrain/features/sweeps/tuning_engine.py": "in the folder of a sweep, whose name is unique",
    "sdk/cloudtrain/features/sweeps/tuning_request.py": NO_FILE,
    "entrypoints/cloudtrain_runtime/checkpoint/inspection.py": "export refuses a file that exists",
    "entrypoints/cloudtrain_runtime/checkpoint/storage.py": (
        "checkpoints that a run has written, and their remains (test_deleted_checkpoints.py)"
    ),
    "entrypoints/cloudtrain_runtime/integrations/checkpoint_folder.py": (
        "checkpoints with a mark; others are set aside (test_integrations.py)"
    ),
    "entrypoints/cloudtrain_runtime/launch.py": TREE,
    "entrypoints/cloudtrain_runtime/launcher/code_outputs.py": TREE,
    "entrypoints/cloudtrain_runtime/launcher/fork_server_agent.py": NEW,
    "entrypoints/cloudtrain_runtime/launcher/group_joins.py": TREE,
    "entrypoints/cloudtrain_runtime/launcher/host_agent.py": NEW,
    "entrypoints/cloudtrain_runtime/launcher/hang.py": TREE,
    "entrypoints/cloudtrain_runtime/launcher/script_report.py": TREE,
    "entrypoints/cloudtrain_runtime/metrics/tracking/process.py": TREE,
    "entrypoints/cloudtrain_runtime/metrics/tracking/tracker.py": (
        "the state of offline files, at a name that only the runs of one training write"
    ),
    "entrypoints/cloudtrain_runtime/process/heartbeat.py": TREE,
    "entrypoints/cloudtrain_runtime/process/rehearsal.py": TREE,
    "entrypoints/cloudtrain_runtime/process/stop_notice.py": TREE,
    "entrypoints/cloudtrain_runtime/training/classification.py": "what a Task's model folder holds",
    "entrypoints/cloudtrain_runtime/training/evaluation_run.py": "what a Task's model folder holds",
    "entrypoints/cloudtrain_runtime/training/trainer.py": "what a Task's model folder holds",
    "entrypoints/cloudtrain_runtime/worker.py": "torchrun's error file of this rank",
}


def _deletes_or_replaces(path: Path) -> bool:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            is_path_replace = (
                name == "replace"
                and len(node.args) == 1
                and not node.keywords
                and isinstance(node.func, ast.Attribute)
                and ast.unparse(node.func.value) != "dataclasses"
            )
            if name in CALLS or is_path_replace:
                return True
    return False


def test_each_deletion_and_replacement_has_a_reason() -> None:
    found = {
        path.relative_to(ROOT).as_posix()
        for folder in ("sdk", "entrypoints")
        for path in (ROOT / folder).rglob("*.py")
        if _deletes_or_replaces(path)
    }
    assert found == set(REASONS)
