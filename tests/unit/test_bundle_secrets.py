"""Detection of secrets in code folders and data folders."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import NoReturn

import certifi
import pytest
from support.code_folders import ACCESS_KEY_ID, user_file_names, write_tree
from support.secret_texts import FOUND_IN_FILES

from cloudtrain.bundle import collect, list_contents
from cloudtrain.errors import BundleError
from cloudtrain.secrets import scanner
from cloudtrain.secrets.scanner import scan_file, scan_folder, scan_text

MIXED = "kT9x7Qm2Lr8Vb4Nc6Zs1Wd3Fg5Hj0KpAyUiOe4Gt"

HEX = "3f9a0c7e5b1d8264a7c0e9f13b5d2846c0a9e7f1"

CERTIFICATE = "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n"

PRIVATE = "-----BEGIN EC " + "PRIVATE KEY-----\nMIIE\n-----END EC " + "PRIVATE KEY-----\n"

SECRETS = {each.kind: each for each in reversed(FOUND_IN_FILES)}


@pytest.mark.parametrize("kind", SECRETS)
def test_tokens_are_refused_with_their_line_and_not_printed(tmp_path: Path, kind: str) -> None:
    folder = write_tree(tmp_path / "a", train_py=f"import os\n\n{SECRETS[kind].text}\n")
    with pytest.raises(BundleError) as caught:
        collect(folder)
    assert f"train.py:3: {kind}" in str(caught.value)
    assert "!/train.py" in caught.value.hint
    assert not [part for part in SECRETS[kind].secrets if part in str(caught.value)]
    (folder / ".cloudtrainignore").write_text("!train.py\n")
    assert user_file_names(folder) == [".cloudtrainignore", "train.py"]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be"])
def test_tokens_are_found_in_every_encoding(encoding: str) -> None:
    for kind, text, _ in FOUND_IN_FILES:
        assert scan_text(f"first\n\n{text}\n".encode(encoding))[:1] == [(3, kind)]


@pytest.mark.parametrize(
    "text",
    [
        "AKIA" + "IOSFODNN7EXAMPLE",
        "aws_secret_access_key = wJalrXUtnFEMI/K7MDENG/bPxRfiCY" + "EXAMPLEKEY",
        "if '-----BEGIN PRIVATE KEY-----' in text:",
        "sklearn.pipeline.make_pipeline_with_a_very_long_name_indeed()",
        "sha256:" + hashlib.sha256(b"").hexdigest(),
        "hf_hub_download(repo_id='org/model', filename='model.bin')",
        "task-aware-learning-rate-schedules-for-transformers",
        "hf_" + "datasetloaderconfigurationregistries",
        "hf_" + "datasetLoaderConfigurationRegistryName",
        "sk-" + "learnlearnlearnlearnlearnlearnlearnlearn",
        "ASIANDEVELOPMENTBANK",
        "password " + "0" * 40,
        f"password {HEX}",
        "wandb_api_key: " + "0" * 40,
        "ghp_" + "x" * 36,
        f"secret_key: {HEX}",
        "secret access key org/apache/hadoop/fs/SxAccessKeyProvider",
    ],
)
def test_text_that_resembles_a_token_is_accepted(text: str) -> None:
    assert scan_text(text.encode()) == []


def test_tokens_are_found_in_text_but_not_in_binaries() -> None:
    for padding in (0, 1, 19, 20, 47, 48, 49, 127, 128, 129, 4000):
        for filler in (b"x", b" ", b"x ", b"-"):
            data = (
                (filler * padding)[:padding]
                + b" "
                + ACCESS_KEY_ID.encode()
                + b" "
                + filler * padding
            )
            assert scan_text(data) == [(1, "AWS access key id")], (padding, filler)
    assert scan_text(b"\0" + ACCESS_KEY_ID.encode()) == []


NAMED_SECRETS = [
    ".env",
    ".env.production",
    "prod.env",
    "id_rsa",
    ".netrc",
    "credentials",
    "client_secret_1.json",
]

NAMED_SECRETS += [
    "terraform.tfstate",
    "kaggle.json",
    "store.p12",
    "secrets.toml",
    ".ENV",
    ".Env",
    ".env~",
    ".env-prod",
]

NAMED_SECRETS += [
    ".env_prod",
    "env.prod",
    ".flaskenv",
    "id_rsa.bak",
    "id_ed25519_work",
    ".huggingface/token",
]

NAMED_SECRETS += [
    "aws_credentials",
    "credentials.txt",
    "#.env#",
    ".env.bak.old",
    "terraform.tfstate.backup",
]


@pytest.mark.parametrize("name", NAMED_SECRETS)
def test_secret_files_are_refused_unless_named(tmp_path: Path, name: str) -> None:
    folder = write_tree(tmp_path / "a", a_py="", sub__b_py="")
    (folder / "sub" / name).parent.mkdir(exist_ok=True)
    (folder / "sub" / name).write_text("x")
    with pytest.raises(BundleError, match=f"sub/{re.escape(name)}: "):
        collect(folder)
    (folder / ".cloudtrainignore").write_text(f"/sub/{name}\n")
    assert f"sub/{name}" not in user_file_names(folder)
    (folder / ".cloudtrainignore").write_text(f"!/sub/{name}\n")
    assert f"sub/{name}" in user_file_names(folder)
    (folder / ".cloudtrainignore").unlink()
    (folder / ".gitignore").write_text(f"/sub/{name}\n")
    assert f"sub/{name}" not in user_file_names(folder)


SEQUENCE, RSA = b"\x30\x82\x04\xa4", b"\x2a\x86\x48\x86\xf7\x0d\x01"

SUSPECTS = [
    ("server.pem", CERTIFICATE.encode() + PRIVATE.encode(), ":4: private key"),
    ("server.key", PRIVATE.encode("utf-16"), ":1: private key"),
    ("pkcs8.der", SEQUENCE + b"\x02\x01\x00\x30\x0d\x06\x09" + RSA + b"\x01", ": private key"),
    ("pkcs1.key", SEQUENCE + b"\x02\x01\x00\x02\x82\x01\x01\x00", ": private key"),
    ("encrypted.p8", b"\x30\x82\x01\x00\x30\x1c\x06\x0a" + RSA + b"\x0c\x01", ": private key"),
    ("encrypted.key", b"\x30\x82\x01\x00\x30\x57\x06\x09" + RSA + b"\x05\x0d", ": private key"),
    ("a.ppk", b"PuTTY-User-Key-File-3: ssh-ed25519\n", ":1: private key"),
    ("fernet.key", f"{MIXED}abc=\n".encode(), ":1: private key"),
    ("x.env.bak", b"# mine\nDB_PASSWORD=hunter2\n", ":2: environment file"),
    ("x.env", b"DATABASE=postgres://me:hunter@host/db\n", ":1: environment file"),
    ("credentials.json", b'{\n "client_secret": "GOCSPX-abc"}', ":2: credentials"),
    (
        ".docker/config.json",
        b'{"auths": {"x": {"auth": "bWU6cHc="}}}',
        ":1: passwords of registries",
    ),
    (".npmrc", b"//registry.npmjs.org/:_authToken=abc\n", ":1: npm token"),
]

HARMLESS = [
    ("cacert.pem", CERTIFICATE.encode()),
    ("cert.der", SEQUENCE + b"\x30\x82\x03\x8c\xa0\x03\x02\x01\x02"),
    ("public.key", b"-----BEGIN PUBLIC KEY-----\nMIIB\n-----END PUBLIC KEY-----\n"),
    ("slides.key", b"PK\x03\x04\x14\x00\x00\x00"),
    ("piano.key", b"C D E F G A B\n"),
    ("requirements.p8", b"torch==2.6\n"),
    ("gym.env", b"CartPole-v1\n"),
    ("multi.env", b"SEED=1\nMODE=train\n"),
    ("x.env", b"API_KEY=${API_KEY}\nTOKEN=\nDEBUG=1\n"),
    (
        "credentials.json",
        b'{"token_uri": "https://oauth2.example.org/token", "client_secret": "<your secret>"}',
    ),
    (".docker/config.json", b'{"auths": {}, "credsStore": "ecr-login"}'),
    (".npmrc", b"//registry.npmjs.org/:_authToken=${NPM_TOKEN}\n"),
    ("config.json", b'{"auth": "basic"}'),
    ("example.env", b"PASSWORD=hunter2\n"),
    ("env.py", b""),
]


@pytest.mark.parametrize(("name", "content", "expected"), SUSPECTS)
def test_content_decides_about_ambiguous_file_names(
    tmp_path: Path, name: str, content: bytes, expected: str
) -> None:
    folder = write_tree(tmp_path / "a", a_py="")
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(content)
    assert [str(finding) for finding in list_contents(folder).refused] == [name + expected]
    assert [str(finding) for finding in scan_folder(folder)] == [
        f"{name}: {expected.rpartition(': ')[2]}"
    ]
    (folder / ".cloudtrainignore").write_text(f"!/{name}\n")
    assert name in user_file_names(folder)


@pytest.mark.parametrize(("name", "content"), HARMLESS)
def test_a_secret_name_with_harmless_content_is_included(
    tmp_path: Path, name: str, content: bytes
) -> None:
    folder = write_tree(tmp_path / "a", a_py="")
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(content)
    assert name in user_file_names(folder)
    assert scan_folder(folder) == []


def test_certificates_of_packages_are_included(tmp_path: Path) -> None:
    folder = write_tree(tmp_path / "a", a_py="")
    (folder / "cacert.pem").write_bytes(Path(certifi.where()).read_bytes())
    assert "cacert.pem" in user_file_names(folder)


def test_a_link_is_scanned_as_its_target(tmp_path: Path) -> None:
    folder = write_tree(tmp_path / "a", a_py="")
    (folder / "server.key").write_bytes(SEQUENCE + b"\x02\x01\x00\x02\x82")
    (folder / ".gitignore").write_text("server.key\n")
    (folder / "data.bin").symlink_to("server.key")
    assert [str(finding) for finding in list_contents(folder).refused] == ["data.bin: private key"]


def test_only_the_beginning_of_a_large_file_is_scanned(tmp_path: Path) -> None:
    folder = write_tree(
        tmp_path / "a",
        first=f"{ACCESS_KEY_ID}\n" + "x " * 3_000_000,
        last="x " * 3_000_000 + ACCESS_KEY_ID,
    )
    contents = list_contents(folder)
    assert [str(finding) for finding in contents.refused] == ["first:1: AWS access key id"]
    digests = {entry.name: (entry.sha256, entry.size) for entry in contents.entries}
    for name in ("first", "last"):
        data = (folder / name).read_bytes()
        assert digests[name] == (hashlib.sha256(data).hexdigest(), len(data))


def test_example_environments_and_public_keys_are_included(tmp_path: Path) -> None:
    folder = write_tree(tmp_path / "a", a_py="")
    for name in (".env.example", ".env.sample", "id_rsa.pub", "credentials.py", "environment.yml"):
        (folder / name).write_text("x")
    assert len(user_file_names(folder)) == 6


def test_folders_of_credentials_are_refused(tmp_path: Path) -> None:
    folder = write_tree(tmp_path / "a", a_py="")
    (folder / ".aws").mkdir()
    (folder / ".aws" / "config").write_text("x")
    with pytest.raises(BundleError, match=r"\.aws/: AWS configuration"):
        collect(folder)
    (folder / ".cloudtrainignore").write_text("!.aws/\n")
    assert ".aws/config" in user_file_names(folder)


def test_all_secrets_are_reported_at_once(tmp_path: Path) -> None:
    folder = write_tree(tmp_path / "a", a_py=f"'{ACCESS_KEY_ID}'\n")
    for number in range(14):
        (folder / f"{number:02}.p12").write_text("x")
    with pytest.raises(BundleError) as caught:
        collect(folder)
    assert caught.value.message.startswith("15 files look like they hold secrets")
    assert "  00.p12: key store\n" in caught.value.message
    assert caught.value.message.endswith("and 5 more places")
    assert len(list_contents(folder).refused) == 15


def test_a_link_to_a_secret_is_a_secret(tmp_path: Path) -> None:
    folder = write_tree(tmp_path / "a", a_py="")
    (folder / ".env").write_text("x")
    (folder / ".gitignore").write_text(".env\n")
    (folder / "notes.txt").symlink_to(".env")
    with pytest.raises(BundleError, match=r"notes\.txt: environment file"):
        collect(folder)
    (folder / ".cloudtrainignore").write_text("!notes.txt\n")
    assert "notes.txt" in user_file_names(folder)


def test_secrets_below_a_data_folder_are_reported(tmp_path: Path) -> None:
    data = write_tree(tmp_path / "data", a_csv=ACCESS_KEY_ID, sub__b_csv="", sub__deep__id_rsa="x")
    for name in (".env", ".aws/config", ".aws/credentials", "sub/deep/x.key", "sub/cert.pem"):
        (data / name).parent.mkdir(exist_ok=True)
        (data / name).write_text(PRIVATE if name.endswith(".key") else CERTIFICATE)
    (data / "sub" / "deep" / "id_rsa").write_text("x")
    os.mkfifo(data / "pipe.pem")
    (data / "loop").symlink_to(".")
    (data / "table.csv").symlink_to(".env")
    assert [str(finding) for finding in scan_folder(data)] == [
        ".aws/: AWS configuration and credentials",
        ".env: environment file",
        "sub/deep/id_rsa: private key",
        "sub/deep/x.key: private key",
        "table.csv: environment file",
    ]
    assert [finding.name for finding in scan_folder(data, most=2)] == [".aws/", ".env"]
    assert [str(finding) for finding in scan_folder(data / ".aws")] == [
        ".aws/: AWS configuration and credentials"
    ]
    assert [str(finding) for finding in scan_folder(data / ".env")] == [".env: environment file"]
    assert scan_folder(tmp_path / "nowhere") == []


def test_a_large_data_folder_is_scanned_only_in_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cloudtrain.secrets.scanner.MAX_FILES", 100)
    for number in range(4):
        folder = write_tree(tmp_path / str(number), **{f"file{n:02}": "" for n in range(40)})
        (folder / "id_rsa").touch()
    names = [finding.name for finding in scan_folder(tmp_path)]
    assert names[:2] == ["0/id_rsa", "1/id_rsa"]
    assert "3/id_rsa" not in names


def test_folders_of_data_are_scanned_without_reading_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of data can contain millions of files."""
    for number in range(2_000):
        folder = tmp_path / str(number // 1000)
        folder.mkdir(exist_ok=True)
        (folder / f"{number}.png").touch()

    def refuse(*_: object, **__: object) -> NoReturn:
        raise AssertionError("a file was opened")

    for opener in ("builtins.open", "io.open", "os.open"):
        monkeypatch.setattr(opener, refuse)
    assert scan_folder(tmp_path) == []


@pytest.mark.parametrize(
    ("text", "is_found"),
    [
        ("--index-url https://user:Zx9vSecret77@pypi.corp/simple", True),
        ("pkg @ git+https://oauth2:Zx9vSecret77abQQ@gitlab.corp/x.git", True),
        ('DB = "postgresql://admin:Zx9vSecret77@db.corp/x"', True),
        ("https://:Zx9vSecret77@host/", True),
        ("https://user:password@pypi.corp/simple", False),
        ("https://user:${PASSWORD1}@pypi.corp/simple", False),
        ('f"postgresql://{user}:{password1}@{host}/x"', False),
        ("postgresql://me:pass1234@localhost:5432/x", False),
        ("ssh://git@host:22222/x", False),
        ("see http://a:8080/b1 or mail me@host", False),
        ("https://host:8080/user@1.2.3/x", False),
    ],
)
def test_passwords_in_urls_are_found(text: str, is_found: bool) -> None:
    kinds = [kind for _, kind in scan_file("config.py", text.encode())]
    assert kinds == ["password in a URL"] * is_found


def test_a_web_token_behind_a_dash_is_found() -> None:
    token = b"eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.dozjgNryP4J3jVmN"
    for before in (b"", b"=", b"session-", b"a-eyJ-"):
        assert scan_file("notes.txt", before + token) == [(1, "JSON web token")]


def test_each_byte_of_a_file_is_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A log has `task-7` in each line, and a hostile file a beginning of a token at each place."""
    searched = list[int]()
    plain = scanner._tokens  # noqa: SLF001 (the number of its calls is the cost)

    def counted(data: bytes, begin: int, end: int) -> object:
        searched.append(min(end, len(data)) - max(0, begin))
        return plain(data, begin, end)

    monkeypatch.setattr(scanner, "_tokens", counted)
    for part in (b"sk-", b"secret ", b"a://b@ ", b"AKIA", b"wandb.login( key0123456789abcdefghij "):
        data = b"0123456789abcdefghij " + part * 20_000
        searched.clear()
        scan_file("notes.txt", data)
        assert sum(searched) <= len(data)
    searched.clear()
    scan_file(
        "log.txt",
        b"".join(b"worker finished task-%d on disk-%d\n" % (n, n % 9) for n in range(9999)),
    )
    assert sum(searched) == 0
