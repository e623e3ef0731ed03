"""The versions of the formats that have one, by file."""

from __future__ import annotations

from collections.abc import Mapping

from cloudtrain.backends.container import state_file
from cloudtrain.client import receipts
from cloudtrain.features.sweeps import stored_sweep
from cloudtrain.planning import plan
from cloudtrain_runtime.contract import manifest, run_config, serving_config
from cloudtrain_runtime.data.global_order import ORDER_VERSION
from cloudtrain_runtime.training import evaluation_run

FORMATS: Mapping[str, int] = {
    "evaluation": evaluation_run.VERSION,
    "manifest.json": manifest.MANIFEST_VERSION,
    "order of samples": ORDER_VERSION,
    "plan.json": plan.PLAN_VERSION,
    "rehearsal.json": receipts.VERSION,
    "run.json": run_config.VERSION,
    "serving.json": serving_config.SERVING_VERSION,
    "state.json": state_file.STATE_VERSION,
    "sweep.json": stored_sweep.SWEEP_VERSION,
}
