"""Runs on SageMaker: upload, send exactly the plan, and tell the truth about it."""

from cloudtrain.backends.sagemaker.backend import SageMakerBackend

__all__ = ["SageMakerBackend"]
