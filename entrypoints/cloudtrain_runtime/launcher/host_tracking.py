"""Trackers on this host: the first host of a job with `tracking` logs its run to them."""

from __future__ import annotations

from collections.abc import Mapping

from cloudtrain_runtime.contract import MlTree, RunConfig
from cloudtrain_runtime.launcher.host import Host
from cloudtrain_runtime.launcher.output import RankOutput
from cloudtrain_runtime.metrics.tracking.process import TrackingProcess, start_tracking
from cloudtrain_runtime.process.event_log import emit


class HostTracking:
    """The process that logs the run, where this host has one.

    Args:
        tree: Folders of this host.
        config: The run's configuration.
        host: This host.
        environment: Variables of the ranks, with the secrets.

    Raises:
        JobError: a tracker's package is not installed.
    """

    def __init__(
        self, tree: MlTree, config: RunConfig, host: Host, environment: Mapping[str, str]
    ) -> None:
        self._process: TrackingProcess | None = None
        self._output: RankOutput | None = None
        if config.tracking is None or host.rank != 0:
            return
        descriptor = None
        if config.secrets:
            # Not the ranks' pipe: their last values are read from it before this process ends.
            self._output = RankOutput(environment[name] for name in config.secrets)
            descriptor = self._output.descriptor
        try:
            self._process = start_tracking(tree, config, environment, descriptor)
        except OSError as error:
            emit("tracking", detail=f"the run is not logged to its trackers: {error}")

    @property
    def variables(self) -> Mapping[str, str]:
        """Variables of the ranks by which their events are logged."""
        return self._process.variables if self._process is not None else {}

    def end(self, exit_code: int, seconds_left: float | None) -> None:
        """Wait until the last values are logged, at most 90 s, and after a stop notice not beyond the grace time.

        Args:
            exit_code: Exit code of the ranks' agent.
            seconds_left: What is left of the grace time; None without a stop notice.
        """
        ending = "failed"
        if seconds_left is not None:
            ending = "stopped"
        elif exit_code == 0:
            ending = "finished"
        if self._process is not None:
            self._process.end(ending, seconds_left)
        if self._output is not None:
            self._output.close_write_end()
            self._output.end()
