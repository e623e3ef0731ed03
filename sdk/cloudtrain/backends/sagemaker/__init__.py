"""The SageMaker backend."""

from cloudtrain.backends.sagemaker.backend import SageMakerBackend

__all__ = ["SageMakerBackend"]
