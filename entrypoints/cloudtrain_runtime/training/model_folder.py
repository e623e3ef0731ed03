"""The model folder that a run leaves: weights, metrics and the analysis by class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from cloudtrain_runtime.contract.strict_json import dump_json
from cloudtrain_runtime.distributed.mesh import Mesh
from cloudtrain_runtime.distributed.parallelize import gather_weights
from cloudtrain_runtime.process.event_log import log_line
from cloudtrain_runtime.training.classification import ClassificationAnalysis


def write_model_folder(
    model: nn.Module, mesh: Mesh, metrics: Mapping[str, Any], analysis: ClassificationAnalysis | None
) -> None:
    """Write model.pt, metrics.json and the analysis. All ranks call this together; rank 0 writes."""
    weights = gather_weights(model, mesh)
    if not mesh.context.is_main:
        return
    folder = mesh.context.model_dir
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(weights, folder / "model.pt")
    (folder / "metrics.json").write_text(dump_json(metrics, indent=1) + "\n", encoding="utf-8")
    if analysis is not None:
        log_line(f"analysis of the {analysis.split} split, class by class: {analysis.write(folder)}")
