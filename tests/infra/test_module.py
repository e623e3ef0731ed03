"""The module as it is written: its format, its plans without an account, its tables, and what a static check says."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest
from terraform_support import MODULE, Terraform, copy_module

EXCEPTIONS = {
    "CKV_AWS_18": "a log of every access is asked for with access_log_bucket",
    "CKV_AWS_144": "a copy in another region is for the owner of the data to decide: checkpoints are large",
    "CKV2_AWS_62": "nobody waits for notifications about objects",
    "CKV2_AWS_11": "flow logs: nothing leaves the network but to AWS's endpoints",
    "CKV_AWS_382": "in an existing network only its owner's routes decide; port 443 alone is open",
    "CKV_AWS_284": "X-Ray traces of a state machine that waits and asks once",
    "CKV_AWS_285": "logs of executions of a state machine that waits and asks once",
    "CKV_AWS_109": "in the policy of a key `*` is that key, and its account must keep control of it",
    "CKV_AWS_111": "in the policy of a key `*` is that key, and its account must keep control of it",
    "CKV_AWS_356": "only for actions that take no resource, and in the policy of a key; tests/infra/test_policies.py",
    "CKV_AWS_283": "any principal: in the policies of endpoints, which only narrow what a principal may do anyway",
}


@pytest.fixture
def module(terraform: Terraform, tmp_path: Path) -> Path:
    """Return a copy that is initialised."""
    copied = copy_module(tmp_path)
    terraform.init(copied)
    return copied


def test_format(terraform: Terraform) -> None:
    done = terraform.run(MODULE, "fmt", "-check", "-recursive", "-diff", fails=True)
    assert done.returncode == 0, done.stdout


def test_plans_are_as_asserted(terraform: Terraform, module: Path) -> None:
    """`terraform test` validates first, then plans with a provider that is a stand-in."""
    done = terraform.run(module, "test", "-no-color", fails=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 passed, 0 failed" in done.stdout


def test_tables_of_the_readme_are_up_to_date() -> None:
    tables = runpy.run_path(str(MODULE / "tables.py"))
    text = (MODULE / "README.md").read_text(encoding="utf-8")
    assert tables["with_tables"](text) == text, "python infra/tables.py --write"


def test_every_variable_is_documented_typed_and_validated() -> None:
    tables = runpy.run_path(str(MODULE / "tables.py"))
    free = {"tags", "access_log_bucket", "permissions_boundary"}  # whatever AWS takes
    for name, block in tables["_blocks"]("variables.tf", "variable"):
        assert block["description"].strip('"').endswith("."), name
        assert block["type"], name
        is_checked = "validation" in block or block["type"] == "bool" or name in free
        assert is_checked, name


def test_nothing_is_written_of_any_machine() -> None:
    left = [path.name for path in MODULE.rglob("*") if path.name.endswith((".tfstate", ".tfvars", ".lock.hcl"))]
    assert left == []


def test_static_check_of_the_module(tmp_path: Path) -> None:
    """checkov brings 290 MB of packages of its own versions, so it is no dependency: name its command to run it."""
    checkov = os.environ.get("CLOUDTRAIN_CHECKOV", "")
    if shutil.which(checkov) is None:
        pytest.skip("CLOUDTRAIN_CHECKOV names no command of checkov (see infra/README.md)")
    done = subprocess.run(
        [checkov, "--directory", str(MODULE), "--framework", "terraform", "--output", "json", "--compact", "--quiet"],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        cwd=tmp_path,
    )
    report = json.loads(done.stdout)
    failed = {each["check_id"]: f"{each['resource']}: {each['check_name']}" for each in report["results"]["failed_checks"]}
    assert report["summary"]["passed"] > 0
    assert {check: what for check, what in failed.items() if check not in EXCEPTIONS} == {}
    assert set(EXCEPTIONS) <= set(failed), "an exception that nothing needs any more"
