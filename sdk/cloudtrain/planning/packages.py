"""Warnings about packages that a job needs and that neither its image nor its requirements contain."""

from __future__ import annotations

from collections.abc import Iterator

from cloudtrain import catalog
from cloudtrain.job.diagnostics import Diagnostic
from cloudtrain.job.spec import JobSpec
from cloudtrain.planning.diagnostics import warning
from cloudtrain.planning.plan import CodeInfo

_BRINGS = {
    "accelerate": ("safetensors", "huggingface-hub"),
    "datasets": ("huggingface-hub",),
    "diffusers": ("safetensors", "huggingface-hub"),
    "lightning": ("pytorch-lightning",),
    "peft": ("accelerate", "transformers", "safetensors", "huggingface-hub"),
    "sentence-transformers": ("transformers", "safetensors", "huggingface-hub"),
    "timm": ("safetensors", "huggingface-hub"),
    "transformers": ("safetensors", "huggingface-hub"),
    "trl": ("accelerate", "datasets", "transformers", "safetensors", "huggingface-hub"),
}
"""Packages that pip installs with a package. Source: the metadata of the packages on PyPI, 2026-11."""


def warn_about_packages(spec: JobSpec, code: CodeInfo, image_uri: str) -> Iterator[Diagnostic]:
    """Warn about packages that are known to be missing in AWS's image and that code.requirements does not name."""
    image = catalog.find_image(image_uri)
    if image is None or code.required is None:
        return
    named = {*code.required, *image.packages}
    named |= {name for package in named for name in _BRINGS.get(package, ())}
    known = catalog.known_packages()
    wanted = {known[module]: place for module, place in code.conventions.imports if module in known}
    if spec.train is not None and spec.tracking.tensorboard:
        wanted["tensorboard"] = "tracking.tensorboard"
    if spec.train is not None and (spec.train.init_from or "").endswith(".safetensors"):
        wanted["safetensors"] = "train.init_from"
    if spec.code.variables.get("CLOUDTRAIN_S3_ENGINE") == "s3torchconnector":
        wanted["s3torchconnector"] = "code.env.CLOUDTRAIN_S3_ENGINE"
    missing = {name: place for name, place in sorted(wanted.items()) if name not in named}
    if missing:
        where = ", ".join(f"{name} ({place})" for name, place in missing.items())
        verb, them = ("are", "them") if len(missing) > 1 else ("is", "it")
        file = spec.code.requirements
        fix = f"add {them} to {file}" if file else f"name {them} in a file, and the file in code.requirements"
        yield warning(
            f"{where} {verb} needed, and neither in AWS's image of PyTorch {image.framework} nor in code.requirements: "
            f"{fix}"
        )
