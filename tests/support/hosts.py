"""Configuration of the run in tests that start a host's launcher."""

from cloudtrain_runtime.contract import CheckpointConfig, RunConfig

SCRIPT_RUN = RunConfig(
    run="demo-261121-101500-1a2b3c",
    task=None,
    script="train.py",
    args=[],
    requirements=None,
    processes_per_instance=2,
    distribution="torch_distributed",
    max_restarts=2,
    train=None,
    checkpoint=CheckpointConfig("", 600, None, 3, "auto"),
    key="of the tests",
)
