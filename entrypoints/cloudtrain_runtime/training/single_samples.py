"""A warning about batch norm over single values, which refuses a batch of one sample in training.

The last step of an epoch may be the first with such a batch, after hours. The sizes are known at the start.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from cloudtrain_runtime.process.event_log import log_line

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def warn_of_single_samples(model: nn.Module, smallest_batch: int | None) -> None:
    """Warn at the first forward pass if a later one has a sample that batch norm would refuse.

    Args:
        model: The model, which no other rank has a part of.
        smallest_batch: Samples in the smallest forward pass of an epoch, on any rank; None if unknown.
    """
    if smallest_batch != 1:
        return
    handles: dict[nn.Module, Any] = {}

    def check(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if not (module.training and inputs and isinstance(inputs[0], torch.Tensor)):
            return
        handles.pop(module).remove()
        values = inputs[0]
        if values[0].numel() > values.shape[1]:  # several values per channel in each sample
            return
        log_line(
            f"warning: the last step of an epoch gives a rank one sample, which {type(module).__name__} refuses in "
            "training: set train.drop_last: true, or change train.batch_size"
        )
        while handles:
            handles.popitem()[1].remove()

    for module in model.modules():
        if isinstance(module, _BATCH_NORMS):
            handles[module] = module.register_forward_pre_hook(check)
