"""What a requirements file names, and the lines of it that pip could not install in a container."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.jobs import Cli

from cloudtrain.job.requirements import excludes_from, read_requirements, rejects

JOB = """\
name: needs
code: {script: train.py, requirements: requirements.txt}
cluster: {instance_type: ml.p4d.24xlarge, instances: 2, framework: "2.13"}
"""
LEGAL = """\
# comment
torch >= 2.0 , < 3      # not pinned
numpy[extra]>=1.0,<3
pinned==1.0 --hash=sha256:abc \\
    --hash=sha256:def
Some_Name.here
old (>=1.0)
local===1.0.dev1+cu118
windows==306 ; sys_platform == "win32"
of-a-build @ file:///croot/x/work ; sys_platform == "darwin"
by-git @ git+https://github.com/a/b@main#egg=other
git+ssh://git@github.com/a/b.git@v1#egg=by-ssh
git+https://${TOKEN}@github.com/a/b.git#egg=by-token
https://example.com:8080/x@v1/wheel-1.0-py3-none-any.whl#egg=wheel
./here
./wheels/mine-1.0-py3-none-any.whl
-e ./here[all]
-e git+https://github.com/a/b#egg=editable
-f https://download.pytorch.org/whl/torch_stable.html
--index-url=https://pypi.example.com/simple
--extra-index-url https://${USER}:${PASSWORD}@pypi.example.com/simple
--no-binary :all:
--pre
-c constraints.txt
-rmore/base.txt
"""


def write(folder: Path, text: str | bytes, **others: str) -> Path:
    data = text if isinstance(text, bytes) else text.encode()
    (folder / "requirements.txt").write_bytes(data)
    for name, content in others.items():
        path = folder / name.replace("__", "/").replace("_txt", ".txt").replace("_toml", ".toml")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return folder


def faults(folder: Path, *, has_own_image: bool = False) -> list[str]:
    found = read_requirements(folder, "requirements.txt", has_own_image=has_own_image).faults
    return [each.message for each in found]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("accelerate>=1.10  # comment\n", True),
        ("accelerate \\\n    ==1.10\n", True),
        ("-c constraints.txt\naccelerate\n", True),
        ("./wheels/mine-1.0-py3-none-any.whl\naccelerate\n", True),
        ("--no-binary :all:\n--pre\naccelerate\n", True),
        # Another file is read, too.
        ("-r pypi.txt\n", True),
        ("-r wheels.txt\naccelerate\n", False),
        ("-r https://example.com/r.txt\naccelerate\n", False),
        ("# accelerate\n", False),
        ("./wheels/mine-1.0-py3-none-any.whl\n", False),
        ("wheels/mine-1.0-py3-none-any.whl\n", False),
        ("mine @ https://example.com/mine-1.0-py3-none-any.whl\n", False),
        ("-e .\ngit+https://github.com/a/b\n", False),
        ("-i https://pypi.example.com/simple\naccelerate\n", False),
        ("--index-url=https://pypi.example.com/simple\naccelerate\n", False),
        ("--extra-index-url \\\n  https://pypi.example.com/simple\naccelerate\n", False),
        ("--no-index\n--find-links wheels\naccelerate\n", False),
        ("-fwheels\naccelerate\n", False),
    ],
)
def test_requirements_that_need_pypi(tmp_path: Path, text: str, expected: bool) -> None:
    write(
        tmp_path,
        text,
        constraints_txt="numpy<2\n",
        pypi_txt="accelerate\n",
        wheels_txt="--no-index\n-f wheels\n",
    )
    assert read_requirements(tmp_path, "requirements.txt").needs_pypi is expected
    assert read_requirements(tmp_path, "missing.txt").needs_pypi is False


def test_legal_lines_have_no_fault(tmp_path: Path) -> None:
    write(
        tmp_path,
        LEGAL,
        here__pyproject_toml="",
        wheels__mine="",
        more__base_txt="-r nested.txt\n",
        more__nested_txt="nested\n",
        constraints_txt="numpy<2\n",
    )
    (tmp_path / "wheels" / "mine-1.0-py3-none-any.whl").touch()
    found = read_requirements(tmp_path, "requirements.txt")
    assert [each.message for each in found.faults] == []
    assert found.names is None
    names = {each.name for each in found.lines}
    assert names >= {"some-name-here", "pinned", "by-git", "by-ssh", "old", "nested", "editable"}
    assert set(found.files) == {
        *("here", "wheels/mine-1.0-py3-none-any.whl", "constraints.txt"),
        *("more/base.txt", "more/nested.txt"),
    }


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("-r ../base.txt", "../base.txt is outside of the code folder, and does not travel"),
        ("--requirement=../base.txt", "../base.txt is outside of the code folder"),
        ("-c missing.txt", "no such file: missing.txt"),
        ("./wheels/mine-1.0-py3-none-any.whl", "no such file or folder: wheels/mine-1.0-py3-"),
        ("mine.whl", "no such file or folder: mine.whl"),
        ("../lib", "../lib is outside of the code folder"),
        ("/home/me/lib", "/home/me/lib is outside of the code folder"),
        ("-e /home/me/lib", "/home/me/lib is outside of the code folder"),
        ("C:\\lib\\x.whl", "is outside of the code folder"),
        ("numpy @ file:///croot/numpy/work", "/croot/numpy/work is outside of the code folder"),
        ("numpy=1.26.4=py311h1_0", "is a line of conda list, which pip cannot read"),
        ("numpy=1.26.4", "is a line of conda list"),
        ("numpy   1.26.4   py311h1_0   conda-forge", "is a line of conda list"),
        ("- numpy", "is a line of conda's environment.yml"),
        ("https://conda.anaconda.org/main/linux-64/x-1-0.conda", "is a package of conda"),
        ("??? what", "is no requirement"),
        ("flask bar", "is no requirement"),
        ("pip install flask", "is a command"),
        ("-e .", "the code folder has no pyproject.toml or setup.py"),
        ("-e ./lib[all]", "lib has no pyproject.toml or setup.py"),
        ("--extra-index-url https://me:hunter@x.com/simple", "has a password or token"),
        ("git+https://me:hunter@github.com/a/b.git", "has a password or token"),
        ("git+https://abcdefghij0123456789@github.com/a/b", "has a password or token"),
    ],
)
def test_a_line_that_pip_cannot_install(tmp_path: Path, line: str, fault: str) -> None:
    write(tmp_path, f"flask\n{line}\n", lib__x_txt="")
    (found,) = faults(tmp_path)
    assert found.startswith("requirements.txt:2: ")
    assert fault in found
    assert "hunter" not in found
    assert "0123456789" not in found


def test_a_fault_has_the_file_and_line_that_includes_it(tmp_path: Path) -> None:
    write(tmp_path, "-r more/base.txt\n", more__base_txt="\nok\n-r ../../up.txt\n")
    (found,) = faults(tmp_path)
    assert found.startswith("more/base.txt:3: -r ../../up.txt: ../up.txt is outside")


def test_files_that_include_each_other_end(tmp_path: Path) -> None:
    write(tmp_path, "a\n-r more.txt\n", more_txt="b\n-r requirements.txt\n")
    assert read_requirements(tmp_path, "requirements.txt").names == {"a", "b"}


@pytest.mark.parametrize(
    "line",
    [
        f"x {'--a ' * 500}@@ @@",
        f"x 1{'=1' * 500} (",
        f"x=1{'=' * 500}\t!",
        f"x{' ' * 500}!",
        f"x=={'1,==' * 500}(",
    ],
)
def test_a_long_wrong_line_is_read_at_once(tmp_path: Path, line: str) -> None:
    # A pattern that tries all divisions of such a line would not end.
    write(tmp_path, f"{line}\n")
    assert len(faults(tmp_path)) == 1


def test_an_own_image_may_have_the_path(tmp_path: Path) -> None:
    write(tmp_path, "/wheels/x.whl\n-r ../base.txt\n")
    (found,) = faults(tmp_path, has_own_image=True)
    assert "../base.txt" in found


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_the_encodings_that_pip_reads(tmp_path: Path, encoding: str) -> None:
    write(tmp_path, "einops==0.8.1\r\nflask\r\n".encode(encoding))
    assert read_requirements(tmp_path, "requirements.txt").names == {"einops", "flask"}


def test_utf_16_without_a_mark_is_no_text_for_pip(tmp_path: Path) -> None:
    write(tmp_path, "einops\n".encode("utf-16-le"))
    assert faults(tmp_path) == ["requirements.txt is no text that pip can read"]


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        ("==2.3.0", True),
        ("==2.13.0", False),
        ("==2.13.1+cu118", False),
        ("==2.13.*", False),
        ("==2.*", False),
        ("==2", True),
        ("~=2.3.0", True),
        ("~=2.3", False),
        ("~=2.14", True),
        ("<2.5", True),
        ("<2.13", True),
        ("<2.13.1", False),
        ("<=2.12.9", True),
        ("<=2.13", False),
        ("<3", False),
        (">=2.0", False),
        (">=2.14", True),
        ("!=2.13.0", False),
    ],
)
def test_versions_that_exclude_a_release(versions: str, expected: bool) -> None:
    assert rejects((versions,), 2, 13) is expected


def test_the_plan_refuses_what_cannot_be_installed(cli: Cli, job: Callable[..., Path]) -> None:
    path = job(JOB, train_py="import torch.distributed\n")
    write(path.parent, "flask\n??? what\n-r ../base.txt\n")
    done = cli("plan", path, "--json")
    assert done.code == 2
    found = [each["message"] for each in done.json["problems"]]
    assert [each.partition(": ")[0] for each in found] == [
        "requirements.txt:2",
        "requirements.txt:3",
    ]
    # A local run does not install them, and this machine may have the paths.
    assert cli("plan", path, "--json", "--local").code == 0


def test_a_file_that_requirements_name_must_travel(cli: Cli, job: Callable[..., Path]) -> None:
    path = job(JOB, train_py="import torch.distributed\n")
    write(path.parent, "-r more/base.txt\n", more__base_txt="flask\n")
    assert cli("plan", path, "--json").code == 0
    path.with_name(".cloudtrainignore").write_text("/more/\n")
    (found,) = cli("plan", path, "--json").json["problems"]
    assert found["path"] == "code.requirements"
    assert "more/base.txt would not be in the container" in found["message"]


def test_a_pin_that_replaces_torch_is_a_warning(cli: Cli, job: Callable[..., Path]) -> None:
    path = job(JOB, train_py="import torch.distributed\n")
    write(path.parent, "flask\ntorch==2.12.1\n")
    found = [text for text in cli("plan", path, "--json").json["warnings"] if "replaces" in text]
    assert len(found) == 1
    assert found[0].startswith("requirements.txt:2: torch==2.12.1 replaces PyTorch 2.13 of AWS's")
    assert found[0].endswith('cluster.framework: "2.12"')
    for text in ("torch>=2.1\n", "torch==2.13.0\n", 'torch==2.1 ; python_version < "3.9"\n'):
        write(path.parent, text)
        assert "replaces" not in str(cli("plan", path, "--json").json["warnings"])


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        ("==1.23.5", True),
        ("==1.26", False),
        ("==1.26.0", False),
        ("==1.26.4", False),
        ("==1.25.*", True),
        ("==1.26.*", False),
        ("==1.*", False),
        ("===1.25", True),
        ("==1.25.2+mkl", True),
        ("==1.25.2.post1", True),
        ("<1.26", True),
        ("<1.26.0", True),
        ("<1.26.1", False),
        ("<2", False),
        ("<=1.25.2", True),
        ("<=1.26", False),
        ("~=1.25.1", True),
        ("~=1.25", False),
        ("~=1.26.1", False),
        (">=1.20", False),
        ("!=1.26.0", False),
        ("==1.x", False),
    ],
)
def test_versions_that_exclude_all_from_a_release(versions: str, expected: bool) -> None:
    assert excludes_from((versions,), "1.26.0") is expected


def test_a_pin_without_a_wheel_is_a_warning(cli: Cli, job: Callable[..., Path]) -> None:
    path = job(JOB, train_py="import torch.distributed\n")
    write(path.parent, "flask\nNumPy>=1.20,<1.24\nscikit_learn==1.2.2\npandas<3\nscipy\n")
    found = [text for text in cli("plan", path, "--json").json["warnings"] if "wheel" in text]
    assert [each.partition(": PyPI")[0] for each in found] == [
        "requirements.txt:2: NumPy>=1.20,<1.24",
        "requirements.txt:3: scikit_learn==1.2.2",
    ]
    assert found[0].endswith("The first release with one is numpy==1.26.0")
    older = cli("plan", path, "--json", "--set=cluster.framework='2.5'").json["warnings"]
    assert "wheel" not in str(older)
    write(path.parent, 'numpy==1.23.5 ; python_version < "3.12"\nnumpy==1.26.4\n')
    assert "wheel" not in str(cli("plan", path, "--json").json["warnings"])
    # A local run uses the packages of this machine.
    write(path.parent, "numpy==1.23.5\n")
    assert "wheel" not in str(cli("plan", path, "--json", "--local").json["warnings"])


def test_a_secret_in_the_code_does_not_hide_the_warning(cli: Cli, job: Callable[..., Path]) -> None:
    path = job(JOB, train_py="import torch.distributed\n")
    write(path.parent, "torch==2.12.1\n")
    path.with_name("id_rsa").write_text("-----BEGIN PRIVATE KEY-----\n")
    done = cli("plan", path)
    assert done.code == 2
    assert "warning: requirements.txt:1: torch==2.12.1 replaces" in done.err
