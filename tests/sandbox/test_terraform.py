"""Terraform works with a sandbox through the sandbox's environment variables."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.sandboxes import Served
from support.terraform import find_terraform

ROOT = """
terraform {
  required_providers {
    aws = { source = "hashicorp/aws" }
  }
}

provider "aws" {
  s3_use_path_style = true # names of buckets do not resolve on loopback
}

resource "aws_s3_bucket" "made" {
  bucket = "made-by-terraform"
}

resource "aws_s3_object" "made" {
  bucket  = aws_s3_bucket.made.bucket
  key     = "folder/object"
  content = "content"
}
"""


@pytest.mark.aws
def test_terraform_applies_and_destroys_a_bucket(sandbox: Served, tmp_path: Path) -> None:
    terraform = find_terraform(tmp_path)
    root, s3 = tmp_path / "root", sandbox.client("s3")
    root.mkdir()
    (root / "main.tf").write_text(ROOT)
    terraform.init(root)
    options = ("-auto-approve", "-input=false", "-no-color")
    terraform.run(root, "apply", *options, environ=sandbox.environment)
    assert (
        s3.get_object(Bucket="made-by-terraform", Key="folder/object")["Body"].read() == b"content"
    )
    terraform.run(root, "destroy", *options, environ=sandbox.environment)
    assert "made-by-terraform" not in [each["Name"] for each in s3.list_buckets()["Buckets"]]
    foreign = {**sandbox.environment, "AWS_ACCESS_KEY_ID": "testing"}
    refused = terraform.run(root, "apply", *options, environ=foreign, fails=True)
    assert refused.returncode == 1
    assert "does not belong to this sandbox" in " ".join(refused.stderr.replace("│", " ").split())
