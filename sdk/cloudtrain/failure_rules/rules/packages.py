"""Rules for Python packages that are missing, conflict or cannot be installed."""

from __future__ import annotations

from cloudtrain.failure_rules.classes import FailureClass
from cloudtrain.failure_rules.rules.base import Causality, Part, Places, Rule, Source

_FIX_REQUIREMENTS = (
    Part("Fix the line in [code.requirements]: the package has no such version, or none for the"),
    Part("Python of this machine.", places=Places.MACHINE),
    Part("container's Python.", places=Places.SAGEMAKER),
)
_PIN_VERSIONS = (
    Part("Pin versions in [code.requirements] that fit the"),
    Part("PyTorch of this machine:", places=Places.MACHINE),
    Part("container's PyTorch:", places=Places.SAGEMAKER),
    Part("one package was built for another."),
)

_INSTALL_PROGRAM = (
    Part("The program {program} is not installed"),
    Part("in the container: use an image that has it, [cluster.image],", places=Places.SAGEMAKER),
    Part("on this machine: install it,", places=Places.MACHINE),
    Part("or do without it."),
)
_USE_GPU_BUILD = (
    Part("This PyTorch is a build for the CPU, and the code asks for CUDA:"),
    Part(
        "remove torch from [code.requirements], which has replaced the container's build.",
        places=Places.SAGEMAKER,
    ),
    Part(
        "install a build for CUDA, let the code use torch.cuda.is_available(), or try it with --cuda-on-cpu.",
        places=Places.MACHINE,
    ),
)
_READ_INNER = (
    Part(
        "{module} cannot be imported, and the lines after this one name the cause: most often a package that was built for"
    ),
    Part("another PyTorch than that of this machine.", places=Places.MACHINE),
    Part("another PyTorch than the container's.", places=Places.SAGEMAKER),
)
_LINK_LIBCUDA = (
    Part(
        "torch.compile finds no libcuda.so: only libcuda.so.1 is there. Create the link that the message names"
    ),
    Part("in the image, or switch torch.compile off.", places=Places.SAGEMAKER),
    Part("on this machine, or switch torch.compile off.", places=Places.MACHINE),
)
_INSTALL_COMPILER = (
    Part("The code compiles CUDA sources when it starts, and there is no compiler (nvcc):"),
    Part("use an image that has one, [cluster.image],", places=Places.SAGEMAKER),
    Part("install the CUDA toolkit,", places=Places.MACHINE),
    Part("or a wheel of the package that is built already."),
)

RULES: tuple[Rule, ...] = (
    # Python's subprocess.
    Rule(
        FailureClass.USER_CODE,
        r"^FileNotFoundError: \[Errno 2\] No such file or directory: '(?P<program>[^'/]+)'",
        _INSTALL_PROGRAM,
        raised_in=r"/subprocess\.py$",
    ),
    # bash, dash and zsh
    Rule(
        FailureClass.USER_CODE,
        r"(?:line \d+|^\w*sh): (?:\d+: )?(?P<program>[\w.+-]+): (?:command )?not found$",
        _INSTALL_PROGRAM,
        needles=("not found",),
        sources=Source.LINE,
    ),
    # pip 24 prints the first two together; the first one lists the available versions.
    Rule(
        FailureClass.DEPENDENCY_INSTALL,
        r"^ERROR: (?:Could not find a version that satisfies the requirement (?P<package>\S+)"
        r"|No matching distribution found for (?P<missing>\S+)|Could not install packages"
        r"|Cannot install .* because these package versions have conflicting|ResolutionImpossible"
        r"|Failed (?:building wheel|to build)|Could not build wheels|Could not open requirements file"
        r"|Invalid requirement|THESE PACKAGES DO NOT MATCH THE HASHES)",
        _FIX_REQUIREMENTS,
        needles=("ERROR: ",),
        sources=Source.LINE,
    ),
    # AWS's toolkit: InstallRequirementsError (sagemaker_training/errors.py)
    Rule(
        FailureClass.DEPENDENCY_INSTALL,
        r"Install(?:Requirements|Module)Error",
        _FIX_REQUIREMENTS,
        needles=("Install",),
    ),
    Rule(
        FailureClass.DEPENDENCY_INSTALL,
        r"^(?:error: subprocess-exited-with-error|pip could not install )",
        _FIX_REQUIREMENTS,
        Causality.SYMPTOM,
        needles=("subprocess-exited-with-error", "pip could not install"),
        sources=Source.LINE,
    ),
    # Python names a submodule only where its package is there.
    Rule(
        FailureClass.DEPENDENCY_INSTALL,
        r"ModuleNotFoundError: No module named '(?P<package>[^'.]+)\.(?P<below>[^']+)'",
        "{package} is there, but has no {below}: install the version or the further package that has it. A file or "
        "folder named {package} of the job's own would hide the package, too.",
    ),
    Rule(
        FailureClass.DEPENDENCY_INSTALL,
        r"ModuleNotFoundError: No module named '(?P<module>[^'.]+)",
        "Add {module} to [code.requirements]; if it is a file of your own, check that cloudtrain files JOB lists it.",
    ),
    # transformers and trl import lazily: what failed is named on the next lines.
    Rule(
        FailureClass.DEPENDENCY_INSTALL,
        r"Failed to import (?P<module>[\w.]+) because of the following error",
        _READ_INNER,
        Causality.SYMPTOM,
    ),
    # torch/utils/cpp_extension.py, after the output of the compiler; Megatron's datasets.
    Rule(
        FailureClass.DEPENDENCY_INSTALL,
        r"Error building extension '(?P<extension>\w+)'",
        "Read what the compiler has printed above: the code compiles {extension} when it starts, and compiler, CUDA and "
        "PyTorch must fit each other. A package that is built already needs none.",
        needles=("Error building extension",),
    ),
    Rule(
        FailureClass.DEPENDENCY_INSTALL,
        r"^make(?:\[\d+\])?: \*\*\* ",
        "The code compiles a part of itself when it starts, and make has failed: read the lines above, and install the "
        "package so that it is built already.",
        Causality.SYMPTOM,
        needles=("make",),
        sources=Source.LINE,
    ),
    # torch/_inductor and triton
    Rule(
        FailureClass.IMAGE_PULL,
        r"libcuda\.so cannot (?:be )?found",
        _LINK_LIBCUDA,
        needles=("libcuda.so cannot",),
    ),
    # tokenizers: the file has a form that the version does not know.
    Rule(
        FailureClass.DEPENDENCY_INSTALL,
        r"data did not match any variant of untagged enum",
        "tokenizer.json has a form that the installed tokenizers cannot read, most often a newer one: raise transformers "
        "and tokenizers in [code.requirements].",
        needles=("did not match any variant of untagged enum",),
    ),
    # datasets before 2.14.6 with fsspec 2023.10 or later
    Rule(
        FailureClass.DEPENDENCY_INSTALL,
        r"Loading a dataset cached in a LocalFileSystem is not supported",
        "datasets is older than fsspec: raise datasets in [code.requirements], or pin fsspec<2023.10.",
    ),
    # accelerate/commands/config/config_args.py
    Rule(
        FailureClass.DEPENDENCY_INSTALL,
        r"ClusterConfig\.__init__\(\) got an unexpected keyword argument '(?P<key>\w+)'",
        "The configuration of accelerate has {key}, which the installed version does not know: remove the line, or pin "
        "the version that wrote it in [code.requirements].",
    ),
    # torch/cuda/__init__.py; torch/utils/cpp_extension.py
    Rule(
        FailureClass.DEPENDENCY_INSTALL,
        r"Torch not compiled with CUDA enabled",
        _USE_GPU_BUILD,
    ),
    Rule(
        FailureClass.DEPENDENCY_INSTALL,
        r"Ninja is required to load C\+\+ extensions",
        "Add ninja to [code.requirements]: the code compiles an extension of PyTorch when it starts.",
    ),
    Rule(
        FailureClass.DEPENDENCY_INSTALL,
        r"CUDA_HOME environment variable is not set",
        _INSTALL_COMPILER,
    ),
    Rule(
        FailureClass.DEPENDENCY_INSTALL,
        r"^ImportError: .*(?:cannot open shared object file|undefined symbol|version `|incompatible)"
        r"|^(?:[\w.]*)PackageNotFoundError|VersionConflict",
        _PIN_VERSIONS,
    ),
)
