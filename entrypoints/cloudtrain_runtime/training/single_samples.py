"""A warning about batch norm over single values, which refuses a batch of one sample in training.

The last step of an epoch may be the first with such a batch, after hours. The sizes are known at the start.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from cloudtrain_runtime.process.event_log import log_line

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@contextlib.contextmanager
def warning_of_single_samples(model: nn.Module, samples: int) -> Iterator[None]:
    """Warn if a forward pass in this context shows batch norm that refuses one sample.

    Args:
        model: The model, which no other rank has a part of.
        samples: Samples of the smallest forward pass in this context.
    """
    norms = {module for module in model.modules() if isinstance(module, _BATCH_NORMS)}

    def check(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if module not in norms or not module.training or not inputs:
            return
        values = inputs[0]
        if not isinstance(values, torch.Tensor) or values.shape[1:] == ():
            # Batch norm itself refuses what has no channels.
            return
        # Several views, tokens or pixels of a sample are several values per channel, also for one
        # sample.
        if values.numel() > values.shape[1] * samples:
            return
        norms.clear()
        log_line(
            f"warning: the last step of an epoch gives a rank one sample, which {type(module).__name__} refuses in "
            "training: set train.drop_last: true, or change train.batch_size"
        )

    # A hook of a module would be in its copies and in what pickles it, too.
    handle = register_module_forward_pre_hook(check)
    try:
        yield
    finally:
        handle.remove()
