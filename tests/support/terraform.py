"""Terraform in tests: the roots of this repository, applied to a server on loopback without network access."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import zipfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.jobs import REPOSITORY, command, serve_moto

MODULE = REPOSITORY / "infra"
SERVER = Path(__file__).parent.parent / "infra" / "account_server.py"
MOTO = Path(__file__).parent.parent / "infra" / "moto.tf"
REGION = "us-west-2"
ROOTS = ("module", "minimal", "existing-vpc")
_SECONDS = 400
KEY_OF_DATA = "11111111-1111-4111-8111-111111111111"
_JOB = """\
name: first
code: {directory: ., script: train.py}
cluster: {instance_type: ml.g5.xlarge, instances: 2}
limits: {runtime: 1h}
"""


@dataclass(frozen=True)
class Terraform:
    """The installed Terraform.

    Attributes:
        plugins: Folder of providers, in the layout of `terraform providers mirror`, but unpacked.
        home: Home folder for Terraform's own files.
    """

    plugins: Path
    home: Path

    def run(
        self,
        root: Path,
        *arguments: str,
        environ: Mapping[str, str] | None = None,
        fails: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in a root module. With `fails`, the command may fail."""
        done = subprocess.run(
            ["terraform", f"-chdir={root}", *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=_SECONDS,
            env={**os.environ, **_OFFLINE, "HOME": str(self.home), **(environ or {})},
        )
        if not fails:
            assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return done

    def init(self, root: Path) -> None:
        """Initialise a root module with the providers in `plugins`."""
        self.run(
            root,
            "init",
            "-input=false",
            "-backend=false",
            "-no-color",
            f"-plugin-dir={self.plugins}",
        )


# No requests to HashiCorp's registry and version check, and to AWS's metadata service.
_OFFLINE = {
    "CHECKPOINT_DISABLE": "1",
    "TF_CLI_CONFIG_FILE": os.devnull,
    "TF_IN_AUTOMATION": "1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


def find_terraform(home: Path) -> Terraform:
    """Return the installed Terraform, or skip the test."""
    plugins = os.environ.get("CLOUDTRAIN_TF_PLUGINS", "")
    if shutil.which("terraform") is None:
        pytest.skip("terraform is not installed")
    if not plugins:
        pytest.skip(
            "CLOUDTRAIN_TF_PLUGINS names no folder with Terraform's AWS provider (see infra/README.md)"
        )
    return Terraform(Path(plugins), home)


def copy_module(folder: Path) -> Path:
    """Copy `infra/`, so that Terraform writes nothing into the repository."""
    ignored = shutil.ignore_patterns(".terraform*", "*.tfstate*", "*.tfvars")
    return Path(shutil.copytree(MODULE, folder / "infra", ignore=ignored))


def apply_all(terraform: Terraform, folder: Path) -> dict[str, Any]:
    """Apply and destroy every root in one account; return the results by root.

    The roots are applied at the same time, because the provider waits almost a minute for S3's lifecycle rules.
    """
    with serve_moto(folder / "moto.log", SERVER) as endpoint:
        environ = {
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_REGION": REGION,
        }
        variables = _variables(folder, environ)
        before = _account(environ)

        def one(root: str) -> dict[str, Any]:
            return _apply(terraform, folder / root, root, {**environ, **variables[root]})

        with ThreadPoolExecutor(len(ROOTS)) as threads:
            results = dict(zip(ROOTS, threads.map(one, ROOTS), strict=True))
        return {**results, "account": {"before": before, "after": _account(environ)}}


def _client(service: str, environ: Mapping[str, str]) -> Any:
    import boto3

    return boto3.client(
        service,
        endpoint_url=environ["AWS_ENDPOINT_URL"],
        aws_access_key_id=environ["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=environ["AWS_SECRET_ACCESS_KEY"],
        region_name=REGION,
    )


def _account(environ: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the resources of the account by kind, read from AWS and not from Terraform's state."""
    ec2, iam = _client("ec2", environ), _client("iam", environ)
    machines = _client("stepfunctions", environ).list_state_machines()["stateMachines"]
    endpoints = ec2.describe_vpc_endpoints()[
        "VpcEndpoints"
    ]  # includes deleted ones for a while, as in AWS
    budgets = _client("budgets", environ).describe_budgets(AccountId="123456789012")["Budgets"]
    found = {
        "buckets": [each["Name"] for each in _client("s3", environ).list_buckets()["Buckets"]],
        "budgets": [each["BudgetName"] for each in budgets],
        "endpoints": [
            each["VpcEndpointId"] for each in endpoints if each["State"].lower() != "deleted"
        ],
        "machines": [each["name"] for each in machines],
        "functions": [
            each["FunctionName"]
            for each in _client("lambda", environ).list_functions()["Functions"]
        ],
        "log groups": [
            each["logGroupName"]
            for each in _client("logs", environ).describe_log_groups()["logGroups"]
        ],
        "policies": [each["PolicyName"] for each in iam.list_policies(Scope="Local")["Policies"]],
        "roles": [each["RoleName"] for each in iam.list_roles()["Roles"]],
        "rules": [each["Name"] for each in _client("events", environ).list_rules()["Rules"]],
        "groups": [each["GroupId"] for each in ec2.describe_security_groups()["SecurityGroups"]],
        "topics": [each["TopicArn"] for each in _client("sns", environ).list_topics()["Topics"]],
        "vpcs": [each["VpcId"] for each in ec2.describe_vpcs()["Vpcs"]],
    }
    return {name: sorted(each) for name, each in found.items()}


def _variables(folder: Path, environ: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Return the TF_VAR_ variables of each root, and create the files and resources that they name."""
    function = folder / "function.zip"
    with zipfile.ZipFile(function, "w") as packed:
        packed.writestr("cloudtrain/__init__.py", "")
    ec2, iam = _client("ec2", environ), _client("iam", environ)
    vpc = ec2.create_vpc(CidrBlock="10.0.0.0/16")["Vpc"]["VpcId"]
    subnet = ec2.create_subnet(VpcId=vpc, CidrBlock="10.0.1.0/24")["Subnet"]["SubnetId"]
    (table,) = ec2.describe_route_tables(Filters=[{"Name": "vpc-id", "Values": [vpc]}])[
        "RouteTables"
    ]
    service = f"com.amazonaws.{REGION}.s3"
    ec2.create_vpc_endpoint(VpcId=vpc, ServiceName=service, RouteTableIds=[table["RouteTableId"]])
    iam.create_role(
        RoleName="deploy", Path="/ci/", AssumeRolePolicyDocument=json.dumps({"Statement": []})
    )
    return {
        "module": {
            "TF_VAR_name": "full",
            "TF_VAR_budget_usd": "1000",
            "TF_VAR_alert_emails": '["ada@example.com", "bob@example.com"]',
            # With these variables, the policies contain every statement. test_permissions.py checks them.
            "TF_VAR_job_queues": f'["arn:aws:batch:{REGION}:123456789012:job-queue/training"]',
            "TF_VAR_read_only_data": '["s3://example-images/train"]',
            "TF_VAR_read_only_keys": f'["arn:aws:kms:{REGION}:123456789012:key/{KEY_OF_DATA}"]',
            "TF_VAR_notify_topics": f'["arn:aws:sns:{REGION}:123456789012:training"]',
            "TF_VAR_secrets": f'["arn:aws:secretsmanager:{REGION}:123456789012:secret:wandb-a1B2c3"]',
            "TF_VAR_mlflow_servers": f'["arn:aws:sagemaker:{REGION}:123456789012:mlflow-app/app-ABCDEFGHIJKL"]',
            "TF_VAR_training_plans": f'["arn:aws:sagemaker:{REGION}:123456789012:training-plan/*"]',
            "TF_VAR_registry_functions": f'["arn:aws:lambda:{REGION}:123456789012:function:registry"]',
            "TF_VAR_allow_remote_debugging": "true",
            "TF_VAR_recovery_function": str(function),
            "TF_VAR_allow_endpoints": "true",
            "TF_VAR_mlflow_artifacts": '["s3://example-mlflow/vision"]',
        },
        "minimal": {},
        "existing-vpc": {
            "TF_VAR_vpc": json.dumps({"id": vpc, "subnets": [subnet]}),
            "TF_VAR_ci_role": "ci/deploy",
        },
    }


def _apply(
    terraform: Terraform, folder: Path, root: str, environ: Mapping[str, str]
) -> dict[str, Any]:
    folder.mkdir()
    module = copy_module(folder)
    here = module if root == "module" else module / "examples" / root
    # An example configures a provider, which a file named *_override.tf extends. The module configures none.
    shutil.copy(MOTO, here / ("moto.tf" if root == "module" else "moto_override.tf"))
    terraform.init(here)
    terraform.run(here, "apply", "-auto-approve", "-input=false", "-no-color", environ=environ)
    shown = json.loads(terraform.run(here, "show", "-json", environ=environ).stdout)
    outputs = {name: output["value"] for name, output in shown["values"]["outputs"].items()}
    first = _first_steps(folder, here, root, environ)
    terraform.run(
        here,
        "destroy",
        "-auto-approve",
        "-refresh=false",
        "-input=false",
        "-no-color",
        environ=environ,
    )
    return {
        "outputs": outputs,
        "resources": list(_resources(shown["values"]["root_module"])),
        **first,
        "left": terraform.run(here, "state", "list", environ=environ).stdout.split(),
    }


def _resources(module: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the created resources, without data sources, of a module and its child modules."""
    own = [
        {name: resource[name] for name in ("address", "type", "name", "values")}
        for resource in module.get("resources", [])
        if resource["mode"] == "managed"
    ]
    return own + [
        resource for child in module.get("child_modules", []) for resource in _resources(child)
    ]


def _first_steps(folder: Path, here: Path, root: str, environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the output of commands for a first job, with settings that `configure` reads from the outputs."""
    job = folder / "job"
    job.mkdir()
    (job / "job.yaml").write_text(_JOB)
    (job / "train.py").write_text("print('hello')\n")

    def run(*arguments: str | Path) -> Any:
        done = subprocess.run(
            [str(command()), "--profile", root, *map(str, arguments), "--json"],
            capture_output=True,
            text=True,
            check=False,
            timeout=_SECONDS,
            env={
                **os.environ,
                **environ,
                "HOME": str(folder),
                "CLOUDTRAIN_HOME": str(folder / "runs"),
            },
        )
        return json.loads(done.stdout)

    return {
        "configured": run("configure", "--from-terraform", here),
        "shown": run("configure", "--show"),
        "planned": run("plan", job / "job.yaml"),
        "checks": run("check", job / "job.yaml")["checks"],
    }


def of_type(
    resources: list[dict[str, Any]], kind: str, name: str | None = None
) -> list[dict[str, Any]]:
    """Return the values of all resources of a type, or of a type and name."""
    return [
        each["values"]
        for each in resources
        if each["type"] == kind and name in (None, each["name"])
    ]


def one_of_type(
    resources: list[dict[str, Any]], kind: str, name: str | None = None
) -> dict[str, Any]:
    """Return the values of the only resource of a type and name."""
    (found,) = of_type(resources, kind, name)
    return found


def policy_of(resources: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    """Return the document of a policy."""
    document: dict[str, Any] = json.loads(one_of_type(resources, kind, name)["policy"])
    return document


def as_list(value: Any) -> list[Any]:
    """Return a list, also for an element that IAM allows to be a single value."""
    return value if isinstance(value, list) else [value]
