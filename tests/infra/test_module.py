"""Format, plans without an account, tables of the README and static check of the Terraform module."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest
from support.jobs import REPOSITORY
from support.terraform import MODULE, Terraform, copy_module

EXCEPTIONS = {
    "CKV2_AWS_11": "flow logs: the network reaches only AWS's endpoints",
    "CKV2_AWS_62": "no consumer needs notifications about objects",
    "CKV_AWS_109": "in a key's policy, `*` means that key, and its account must keep control of it",
    "CKV_AWS_111": "in a key's policy, `*` means that key, and its account must keep control of it",
    "CKV_AWS_144": "the owner decides whether checkpoints, which are large, are copied to another region",
    "CKV_AWS_284": "tracing of a state machine that waits and makes one request",
    "CKV_AWS_285": "log of a state machine that waits and makes one request; AWS keeps its executions for 90 days",
    "CKV_AWS_356": "in a key's policy, `*` means that key; for roles see test_policies.py",
    "CKV_AWS_394": "the module uses the first two zones by name; the name of a new zone sorts after them",
}


@pytest.fixture
def module(terraform: Terraform, tmp_path: Path) -> Path:
    """Return an initialised copy of the module."""
    copied = copy_module(tmp_path)
    terraform.init(copied)
    return copied


def test_format(terraform: Terraform) -> None:
    done = terraform.run(MODULE, "fmt", "-check", "-recursive", "-diff", fails=True)
    assert done.returncode == 0, done.stdout


def test_plans_are_as_asserted(terraform: Terraform, module: Path) -> None:
    """`terraform test` validates first, then plans with a mock provider."""
    done = terraform.run(module, "test", "-no-color", fails=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "10 passed, 0 failed" in done.stdout


def test_tables_of_the_readme_are_up_to_date() -> None:
    tables = runpy.run_path(str(MODULE / "tables.py"))
    text = (MODULE / "README.md").read_text(encoding="utf-8")
    assert tables["with_tables"](text) == text, "python infra/tables.py --write"


def test_registries_are_those_of_the_catalog() -> None:
    """The role may pull the images of all plans, in every region."""
    tables = runpy.run_path(str(MODULE / "tables.py"))
    (names,) = (each for each in tables["_load"](MODULE / "main.tf")["locals"])
    written = {key.strip('"'): value.strip('"') for key, value in names["image_registries"].items()}
    written.pop("__is_block__", None)
    known = json.loads(
        (REPOSITORY / "sdk" / "cloudtrain" / "catalog" / "images.json").read_text(encoding="utf-8")
    )
    default = known["registries"]["us-west-2"]
    assert written == {
        region: account for region, account in known["registries"].items() if account != default
    }
    assert f'"{default}"' in names["image_registry"]


def test_every_variable_is_documented_typed_and_validated() -> None:
    tables = runpy.run_path(str(MODULE / "tables.py"))
    free = {"tags", "access_log_bucket", "permissions_boundary"}  # any value that AWS accepts
    for name, block in tables["_blocks"]("variables.tf", "variable"):
        assert block["description"].strip('"').endswith("."), name
        assert block["type"], name
        is_checked = "validation" in block or block["type"] == "bool" or name in free
        assert is_checked, name


def test_static_check_of_the_module(tmp_path: Path) -> None:
    """Checkov installs 290 MB of packages, one of which replaces python-hcl2, so it is no dependency."""
    checkov = os.environ.get("CLOUDTRAIN_CHECKOV", "")
    if shutil.which(checkov) is None:
        pytest.skip("CLOUDTRAIN_CHECKOV names no command of checkov (see infra/README.md)")
    done = subprocess.run(
        [
            *(checkov, "--directory", str(MODULE), "--framework", "terraform", "--skip-download"),
            *("--output", "json", "--compact", "--quiet"),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        cwd=tmp_path,
    )
    report = json.loads(done.stdout)
    failed = {
        each["check_id"]: f"{each['resource']}: {each['check_name']}"
        for each in report["results"]["failed_checks"]
    }
    assert report["summary"]["passed"] > 0
    assert {check: text for check, text in failed.items() if check not in EXCEPTIONS} == {}
    assert set(EXCEPTIONS) <= set(failed), "remove exceptions that are not needed any more"
