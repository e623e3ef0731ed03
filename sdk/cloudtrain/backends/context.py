"""What a backend is opened with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from cloudtrain.support.steps import Steps

if TYPE_CHECKING:
    from cloudtrain.catalog import Prices
    from cloudtrain.settings.settings import Settings


@dataclass(frozen=True)
class BackendContext:
    """What a backend is opened with.

    Attributes:
        home: Folder of local runs (`.cloudtrain`) for new runs.
        load_settings: Returns the account's settings; a backend that needs none does not read them.
        load_prices: Returns the newest prices on this machine.
        other_homes: Folders of local runs where runs are looked up, too.
        installs: Whether local runs use an environment with their requirements.
        cuda_on_cpu: Whether local runs use a stand-in for CUDA.
        steps: Receives what takes long, such as an installation.
        site: Name of the site in the settings, for a backend that has several; None for the only one.
    """

    home: Path
    load_settings: Callable[[], Settings]
    load_prices: Callable[[], Prices]
    other_homes: tuple[Path, ...] = ()
    installs: bool = False
    cuda_on_cpu: bool = False
    steps: Steps = field(default_factory=Steps)
    site: str | None = None

    @property
    def homes(self) -> tuple[Path, ...]:
        """All folders of local runs."""
        return (self.home, *self.other_homes)
