"""The memory of one rank: exact bytes of its state, and an estimate of its activations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cloudtrain.catalog import Instance
from cloudtrain.support.units import format_size
from cloudtrain_runtime.contract.strict_json import load_json

GIB = 2**30
GPU_RESERVED_BYTES = int(1.5 * GIB)
"""Part of a GPU's memory that is assumed for CUDA's context, NCCL's buffers and the allocator's unused blocks.

Source: a CUDA context takes 0.3 to 0.6 GiB (PyTorch forums), NCCL some 0.1 GiB per communicator; the rest is margin."""


@dataclass(frozen=True)
class RankMemory:
    """What one rank holds. All figures are bytes.

    Attributes:
        parameters: Its parameters or shards, and its buffers.
        gradients: Their gradients.
        optimizer: State of the optimizers.
        gathered: Parameters of other ranks that FSDP gathers at the same time, at most.
        fixed_activations: Part of the activations that does not depend on the batch.
        activations_per_sample: Part of the activations that each sample of a micro-batch adds.
    """

    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    fixed_activations: float
    activations_per_sample: float

    @classmethod
    def from_probe(cls, line: str) -> RankMemory:
        """Return the memory that a line of the probe describes.

        Raises:
            ValueError: it is not the probe's answer, or the data has too few samples to measure activations.
        """
        try:
            found = load_json(line)
            state = found["state"]
            measured = found["activations"]
            points = [(int(each["samples"]), int(each["bytes"])) for each in measured]
            parameters = int(state["parameters"])
            gradients = int(state["gradients"])
            optimizer = int(state["optimizer"])
            gathered = int(state["gathered"])
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"not an answer of the probe: {line[:200]!r}") from None
        if len(points) < 2:  # noqa: PLR2004 (a line has two points)
            raise ValueError(
                "the training data has too few samples to measure activations at two batch sizes"
            )
        fixed, per_sample = _line_through(points)
        return cls(
            parameters=parameters,
            gradients=gradients,
            optimizer=optimizer,
            gathered=gathered,
            fixed_activations=fixed,
            activations_per_sample=per_sample,
        )

    @property
    def state_bytes(self) -> int:
        """Parameters, gradients and optimizer state together."""
        return self.parameters + self.gradients + self.optimizer

    def activation_bytes(self, samples: int) -> float:
        """Return the estimated activations of a micro-batch."""
        return self.fixed_activations + self.activations_per_sample * samples

    def peak_bytes(self, samples: int) -> float:
        """Return the estimated peak, without what CUDA and NCCL need.

        The optimizer's update runs after the activations are freed, and needs temporary tensors of about the size of
        the parameters.
        """
        return self.state_bytes + max(
            self.gathered + self.activation_bytes(samples), self.parameters
        )

    def describe(self, samples: int) -> str:
        """Return the parts in words."""
        parts = [
            f"parameters {format_size(self.parameters)}",
            f"gradients {format_size(self.gradients)}",
            f"optimizer {format_size(self.optimizer)}",
        ]
        if self.gathered:
            parts.append(f"gathered shards {format_size(self.gathered)}")
        activations = format_size(self.activation_bytes(samples))
        parts.append(f"activations of {samples} samples {activations} (an estimate)")
        return ", ".join(parts)


def _line_through(points: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """Return the intercept, at least 0, and the slope of the line through the first and the last point."""
    first, low = points[0]
    last, high = points[-1]
    slope = max(0.0, (high - low) / (last - first))
    return max(0.0, low - slope * first), slope


def rank_capacity(instance: Instance, processes: int) -> int | None:
    """Return the bytes that one of an instance's ranks can use: a GPU or its share of one; else of the host's memory.

    None where the catalog does not have the memory.
    """
    if instance.gpus:
        if instance.gpu_memory_gb is None:
            return None
        own = instance.gpu_memory_gb * GIB * min(1.0, instance.gpus / processes)
        return int(own) - GPU_RESERVED_BYTES
    if instance.memory_gb is None:
        return None
    return int(instance.memory_gb * GIB / processes)
