"""A run that begins with the checkpoint of another one, and with other code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.jobs import Cli, command

pytestmark = [pytest.mark.processes, pytest.mark.promise]


def test_fixed_code_continues_where_the_old_code_has_failed(
    cli: Cli, small: Callable[..., Path]
) -> None:
    path = small(fail_at=5)
    failed = cli("submit", path, "--local", "--follow", "--json")
    run = failed.json["run"]
    source = path.with_name("small.py")
    lines = source.read_text().splitlines()
    (place,) = [number for number, line in enumerate(lines, start=1) if "raise ValueError" in line]
    advice = f"next: fix small.py:{place}, then: {command()} submit {path} --local --continue {run}"
    assert advice in failed.err, failed.err

    found = cli("explain", run, "--json").json
    assert found["place"] == f"small.py:{place}"
    again = f"cloudtrain submit JOB --local --continue {run}"
    assert (
        found["action"]
        == f"Fix small.py:{place}. Then begin with its checkpoint, by checkpoint.resume: {again}"
    )

    source.write_text("\n".join(line.replace("raise ValueError", "str") for line in lines))
    done = cli("submit", path, "--local", "--continue", run[-6:], "--follow", "--json")
    assert done.code == 0, done.err
    assert "resumed from step 4" in done.err
    assert done.json["last_step"] == 36


def test_an_unknown_run_is_refused(cli: Cli, small: Callable[..., Path]) -> None:
    refused = cli("submit", small(), "--local", "--continue", "ffffff")
    assert refused.code == 2
    assert "ffffff" in refused.err
    assert not cli("list", "--json").json["runs"]
