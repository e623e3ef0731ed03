"""What the installation of a local run's requirements reports."""

from __future__ import annotations

import fcntl
import tarfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from cloudtrain.backends.container import environments
from cloudtrain.support.steps import Steps

pytest.importorskip("torch")


class Recorded(Steps):
    """Keeps what it receives."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.has_begun = threading.Event()

    def on_progress(self, text: str) -> None:
        """Keep a step."""
        self.texts.append(text)
        self.has_begun.set()

    def on_done(self, text: str, seconds: float) -> None:
        """Keep what a step has done."""
        assert seconds >= 0
        self.texts.append(text)


@pytest.fixture
def prepare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Steps], Path]:
    """Return a function that prepares an environment whose requirements are all there."""
    monkeypatch.setattr(environments, "_create", lambda folder: folder.mkdir())
    monkeypatch.setattr(environments, "_run", lambda *_: None)
    (tmp_path / "requirements.txt").write_text("torch\n")
    archive = tmp_path / "bundle.tar.gz"
    with tarfile.open(archive, "w:gz") as bundle:
        bundle.add(tmp_path / "requirements.txt", "requirements.txt")
    return lambda steps: environments.prepare_environment(
        tmp_path / "environments", archive, "requirements.txt", steps
    )


def test_nothing_to_install_is_said(prepare: Callable[[Steps], Path]) -> None:
    steps = Recorded()
    prepare(steps)
    assert steps.texts == ["installing requirements.txt", "Found nothing to install"]
    again = Recorded()
    prepare(again)
    assert again.texts == []


def test_the_end_of_another_installation_is_reported(
    prepare: Callable[[Steps], Path], tmp_path: Path
) -> None:
    prepare(Steps())
    (lock,) = (tmp_path / "environments").glob("*.lock")
    steps = Recorded()
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        thread = threading.Thread(target=prepare, args=(steps,))
        thread.start()
        assert steps.has_begun.wait(60)
        fcntl.flock(held, fcntl.LOCK_UN)
    thread.join(60)
    assert steps.texts == [
        "waiting for another command that installs requirements.txt",
        "Another command installed requirements.txt",
    ]
