"""Model FLOPs utilisation (MFU): the share of a device's peak that a run uses.

MFU counts the FLOPs that the model's forward and backward passes need; recomputed activations do not count (Chowdhery
et al., PaLM, 2022, appendix B).
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from cloudtrain_runtime.process.seeds import IsolatedRandomState
from cloudtrain_runtime.task import Task

_TERA = 1e12


@dataclass(frozen=True)
class _Peak:
    """Dense TFLOP/s of a GPU by precision; None where its tensor cores do not support it."""

    bf16: float | None
    fp16: float
    tf32: float | None
    fp32: float


# A name matches when it has all these words; the first match counts. From the A100 on, datasheets give tensor-core
# figures with structured sparsity; the dense figures here are half of them.
_PEAKS: tuple[tuple[tuple[str, ...], _Peak], ...] = (
    # NVIDIA HGX B200 and GB200 specifications, 2024-11 (per GPU).
    (("GB200",), _Peak(2500, 2500, 1250, 80)),
    (("B200",), _Peak(2250, 2250, 1125, 75)),
    # NVIDIA H200 datasheet, 2024-11.
    (("H200", "NVL"), _Peak(836, 836, 418, 60)),
    (("H200",), _Peak(989, 989, 494, 67)),
    # NVIDIA H100 datasheet, 2023-03, and of the NVL 2024-10.
    (("H100", "NVL"), _Peak(835, 835, 417, 60)),
    (("H100", "PCIe"), _Peak(756, 756, 378, 51)),
    (("H100",), _Peak(989, 989, 494, 67)),
    # NVIDIA A100 datasheet, 2021-06.
    (("A100",), _Peak(312, 312, 156, 19.5)),
    # NVIDIA L40S datasheet, 2023-08.
    (("L40S",), _Peak(362, 362, 183, 91.6)),
    # NVIDIA L4 datasheet, 2023-03.
    (("L4",), _Peak(121, 121, 60, 30.3)),
    # NVIDIA A10G datasheet for AWS, 2022-02-17.
    (("A10G",), _Peak(70, 70, 35, 35)),
    # NVIDIA T4 datasheet, 2019-03.
    (("T4",), _Peak(None, 65, None, 8.1)),
    # NVIDIA V100 datasheet, 2020-01.
    (("V100", "SXM2"), _Peak(None, 125, None, 15.7)),
    (("V100", "PCIE"), _Peak(None, 112, None, 14)),
)


def peak_flops(name: str, precision: str, *, uses_tf32: bool = False) -> float | None:
    """Return the dense peak of a GPU in FLOP/s, or None if it is unknown.

    Args:
        name: Device name that CUDA reports, such as `NVIDIA H100 80GB HBM3`.
        precision: `fp32`, `bf16` or `fp16`.
        uses_tf32: Whether fp32 products may use TF32.
    """
    words = set(name.replace("-", " ").split())
    if "MIG" in words:
        return None  # a slice of a GPU
    peak = next((peak for wanted, peak in _PEAKS if words.issuperset(wanted)), None)
    if peak is None:
        return None
    found = getattr(peak, "tf32" if precision == "fp32" and uses_tf32 and peak.tf32 else precision)
    return None if found is None else found * _TERA


def device_peak_flops(device: torch.device, precision: str) -> float | None:
    """Return the dense peak of a device in FLOP/s, or None if it is unknown, as for every CPU."""
    if device.type != "cuda":
        return None
    uses_tf32 = torch.get_float32_matmul_precision() != "highest"
    return peak_flops(torch.cuda.get_device_name(device), precision, uses_tf32=uses_tf32)


def meta_copy(model: nn.Module) -> nn.Module:
    """Return a copy of a model on the meta device, which takes no memory. The model must not be sharded yet."""
    tensors = [*model.parameters(), *model.buffers()]
    empty: dict[int, Any] = {}
    for tensor in tensors:
        bare = torch.empty_like(tensor, device="meta")
        is_parameter = isinstance(tensor, nn.Parameter)
        empty[id(tensor)] = nn.Parameter(bare, tensor.requires_grad) if is_parameter else bare
    return copy.deepcopy(model, empty)


def count_flops(task: Task, shape: nn.Module, batch: Any) -> int | None:
    """Return the FLOPs of a forward and backward pass over a batch, or None if they cannot be counted.

    Model and batch are on the meta device and have no values: the FLOPs of a loss that reads values cannot be counted.
    """
    from torch.utils._pytree import tree_map_only
    from torch.utils.flop_counter import FlopCounterMode

    bare = tree_map_only(
        torch.Tensor, lambda tensor: torch.empty_like(tensor, device="meta"), batch
    )
    counter = FlopCounterMode(display=False)
    try:
        # The count must not change the random states of training.
        with IsolatedRandomState(0), counter:
            loss = task.loss(shape, bare)
            (loss[0] if isinstance(loss, tuple) else loss).backward()  # type: ignore[no-untyped-call]
    # A loss that reads values raises one of these errors, because tensors on the meta device have no values.
    except (RuntimeError, TypeError, ValueError, AttributeError, LookupError, AssertionError):
        return None
    return counter.get_total_flops() or None
