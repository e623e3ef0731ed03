"""Rules for Python packages that are missing, conflict or cannot be installed."""

from __future__ import annotations

from cloudtrain.failure_rules.classes import FailureClass
from cloudtrain.failure_rules.rules.base import Causality, Rule, Source, in_cloud, on_machine

_FIX_REQUIREMENTS = (
    "Fix the line in [code.requirements]: the package has no such version, or none for the",
    on_machine("Python of this machine."),
    in_cloud("container's Python."),
)
_PIN_VERSIONS = (
    "Pin versions in [code.requirements] that fit the",
    on_machine("PyTorch of this machine:"),
    in_cloud("container's PyTorch:"),
    "one package was built for another.",
)

_INSTALL_PROGRAM = (
    "The program {program} is not installed",
    in_cloud("in the container: use an image that has it, [cluster.image],"),
    on_machine("on this machine: install it,"),
    "or do without it.",
)
_USE_GPU_BUILD = (
    "This PyTorch is a build for the CPU, and the code asks for CUDA:",
    in_cloud("remove torch from [code.requirements], which has replaced the container's build."),
    on_machine(
        "install a build for CUDA, let the code use torch.cuda.is_available(), or try it with --cuda-on-cpu."
    ),
)
_READ_INNER = (
    "{module} cannot be imported, and the lines after this one name the cause: most often a package that was built for",
    on_machine("another PyTorch than that of this machine."),
    in_cloud("another PyTorch than the container's."),
)
_LINK_LIBCUDA = (
    "torch.compile finds no libcuda.so: only libcuda.so.1 is there. Create the link that the message names",
    in_cloud("in the image, or switch torch.compile off."),
    on_machine("on this machine, or switch torch.compile off."),
)
_INSTALL_COMPILER = (
    "The code compiles CUDA sources when it starts, and there is no compiler (nvcc):",
    in_cloud("use an image that has one, [cluster.image],"),
    on_machine("install the CUDA toolkit,"),
    "or a wheel of the package that is built already.",
)

_LOOSEN_REQUIREMENTS = "Two lines of [code.requirements] contradict each other, as pip lists below: loosen or remove one."
_REACH_INDEX = (
    (
        "pip has found no release of {package} at all. If lines with Retrying or a broken connection stand above, it reaches "
        "no index:"
    ),
    in_cloud(
        "give [cluster.network.subnets] internet access, or name an index in code.env.PIP_INDEX_URL."
    ),
    on_machine("connect this machine, or name an index in code.env.PIP_INDEX_URL."),
    "Else no package has this name: fix the line in [code.requirements].",
)
_READ_BUILD = (
    "pip must build a package of [code.requirements] (Collecting names it), and its build has failed: read its own error "
    "in pip's output. If that is No module named 'torch' or 'numpy', the build does not see what is installed: name a wheel that "
    "is built already."
)
_ADD_PACKAGE = (
    "The message asks for a package:",
    in_cloud("add {package} to [code.requirements]."),
    on_machine(
        "install {package} here by pip, and add it to a file for code.requirements, for SageMaker."
    ),
)
_RAISE_PACKAGE = (
    "The message asks for a newer {package}: name its version in [code.requirements],",
    in_cloud("because pip keeps an older one that fits the line."),
    on_machine("and install it here."),
)
_FIT_VERSIONS = (
    "{imported} cannot be imported ({place}), because code of a package fails: most often the installed versions do not fit "
    "each other or this Python. Pin in [code.requirements] another version of the package that has raised it, or of the "
    "one that the message names."
)
_FIT_ATTRIBUTE = (
    "A package uses {module}.{name}, which the installed version of {module} does not have, so the two do not fit: pin in "
    "[code.requirements] another version of the package that uses it, or of {module}."
)
_FIT_TORCHVISION = (
    "torchvision does not fit this PyTorch:",
    in_cloud(
        "remove torch and torchvision from [code.requirements], so that those of the container stay, or pin two releases "
        "that belong together."
    ),
    on_machine("install two releases that belong together."),
)
_FIT_CUDA = (
    (
        "The code compiles CUDA sources when it starts, and the compiler is of CUDA {installed}, while PyTorch was built for "
        "{built}:"
    ),
    in_cloud(
        "if [code.requirements] replaces torch, remove it there; else use an image in which both fit."
    ),
    on_machine("install the CUDA toolkit {built}, or a PyTorch for {installed}."),
)
_INSTALL_LIBRARY = (
    "The system library {library}, which is no Python package, is missing",
    in_cloud("in the container: use an image that has it, [cluster.image]."),
    on_machine("on this machine: install it."),
)
_USE_HEADLESS = (
    "{library} is a system library for screens. If OpenCV (cv2) asks for it, name opencv-python-headless in place of "
    "opencv-python in [code.requirements], which needs none; else install the library in the image."
)
_FIT_SYSTEM = (
    "A package was built on a newer system, and lacks {version}",
    in_cloud("in the container: use a newer image, [cluster.image],"),
    on_machine("on this machine: use a newer system,"),
    "or pin an older release of the package in [code.requirements].",
)
_FIT_PROCESSOR = (
    "A program was built for another kind of processor than",
    in_cloud(
        "[cluster.instance_type] has: build the image with docker build --platform linux/amd64, or linux/arm64 for types "
        "with Graviton processors."
    ),
    on_machine("this machine has: install the build for it."),
)
_INSTALL_GIT = (
    "A line of [code.requirements] begins with git+, and the program git is not installed",
    in_cloud(
        "in the container: name a release or an archive (a zip file or a wheel) in place of the repository, or use an image "
        "with git."
    ),
    on_machine("on this machine: install it."),
)
_PACKAGES = r"/(?:site|dist)-packages/"
"""Part of the path of each installed package."""

_ASKED_PACKAGES = (
    r"Missing optional dependency '(?P<package>[\w.-]+)'",
    r"requires the following packages that were not found in your environment: (?P<package>[\w-]+(?:, [\w-]+)*)",
    r"the package (?P<package>[\w-]+) seems to be not installed",
    r"Neither [`'](?P<package>[\w-]+)[`'] nor [`'][\w-]+[`'] is available",
    (
        r"(?:requires|needs|need to have) (?:the )?[`']?(?!(?:PyTorch|TensorFlow|Flax|JAX|CUDA|cuDNN|nvcc|gcc|git|ffmpeg)\b)"
        r"(?P<package>[A-Za-z][\w-]*)[`']?(?: or [\w-]+)? (?:library )?(?:to be installed|installed|but it was not found)"
    ),
    r"^ImportError: Using .* requires [`'](?P<package>[A-Za-z][\w-]*)[<>=!]",
    r"pip install [\"'`]?(?!git\+|https?:)(?P<package>[A-Za-z][\w-]*(?:\.[\w-]+)*(?:\[[\w,-]+\])?(?:[<>=!~]=?[\w.*]+)?)",
)
"""How packages ask for others, in place of Python's `No module named`."""

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
    # The system's loader, where a shell or Docker starts a program.
    Rule(
        FailureClass.IMAGE_PULL,
        r"(?:^exec \S+: |cannot execute binary file: )[Ee]xec format error",
        _FIT_PROCESSOR,
        needles=("xec format error",),
        sources=Source.LINE,
    ),
    # pip, before the lines of the next rule or in their place
    Rule(
        FailureClass.DEPENDENCY_INSTALL,
        r"Cannot find command 'git'",
        _INSTALL_GIT,
        needles=("Cannot find command 'git'",),
        sources=Source.LINE,
    ),
    Rule(
        FailureClass.DEPENDENCY_INSTALL,
        r"^ERROR: (?:Cannot install .* because these package versions have conflicting|ResolutionImpossible)",
        _LOOSEN_REQUIREMENTS,
        needles=("ERROR: ",),
        sources=Source.LINE,
    ),
    Rule(
        FailureClass.DEPENDENCY_INSTALL,
        r"^ERROR: Could not find a version that satisfies the requirement (?P<package>\S+) \(from versions: none\)",
        _REACH_INDEX,
        needles=("ERROR: ",),
        sources=Source.LINE,
    ),
    Rule(
        FailureClass.DEPENDENCY_INSTALL,
        r"Failed to build .* when getting requirements to build",
        _READ_BUILD,
        needles=("when getting requirements to build",),
        sources=Source.LINE,
    ),
    # pip can go on with an older release of the package.
    Rule(
        FailureClass.DEPENDENCY_INSTALL,
        r"(?:Getting requirements to build \w+|Preparing metadata \S+|python setup\.py egg_info) did not run successfully",
        _READ_BUILD,
        Causality.SYMPTOM,
        needles=("did not run successfully",),
        sources=Source.LINE,
    ),
    # pip 24 prints the first two together; the first one lists the available versions.
    Rule(
        FailureClass.DEPENDENCY_INSTALL,
        r"^ERROR: (?:Could not find a version that satisfies the requirement (?P<package>\S+)"
        r"|No matching distribution found for (?P<missing>\S+)|Could not install packages"
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
    # pip's last words, which can look like the exception of the traceback that it has quoted
    Rule(
        FailureClass.DEPENDENCY_INSTALL,
        r"^error: (?:subprocess-exited-with-error|metadata-generation-failed)",
        _READ_BUILD,
        Causality.SYMPTOM,
        needles=("subprocess-exited-with-error", "metadata-generation-failed"),
        sources=Source.LINE | Source.EXCEPTION,
    ),
    Rule(
        FailureClass.DEPENDENCY_INSTALL,
        r"^pip could not install ",
        _FIX_REQUIREMENTS,
        Causality.SYMPTOM,
        needles=("pip could not install",),
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
    # bitsandbytes/cextension.py
    Rule(
        FailureClass.DEPENDENCY_INSTALL,
        r"CUDA Setup failed despite (?:GPU|CUDA) being available",
        "bitsandbytes has no build for the CUDA of this PyTorch: pin another release in [code.requirements]. The lines above "
        "name the file that it looked for.",
    ),
    # xformers/ops/fmha/dispatch.py: the message gives the reason of each kernel.
    Rule(
        FailureClass.DEPENDENCY_INSTALL,
        r"No operator found for `memory_efficient_attention",
        "xFormers has no kernel for this call, and its message has the reason of each. If it says that xFormers was not built "
        "with CUDA, pin in [code.requirements] the release for this PyTorch; else change what it names (dtype, shape, "
        "device).",
    ),
    # torch/_inductor/exc.py
    Rule(
        FailureClass.DEPENDENCY_INSTALL,
        r"Cannot find a working triton installation",
        "torch.compile needs Triton: add to [code.requirements] the triton that this PyTorch names in its own requirements, or "
        "do not compile.",
    ),
    # deepspeed/ops/op_builder/builder.py; torch/utils/cpp_extension.py
    Rule(
        FailureClass.DEPENDENCY_INSTALL,
        r"Installed CUDA version (?P<installed>[\d.]+) does not match the version torch was compiled with (?P<built>\d[\d.]*\d)",
        _FIT_CUDA,
    ),
    Rule(
        FailureClass.DEPENDENCY_INSTALL,
        r"detected CUDA version \((?P<installed>[\d.]+)\) mismatches the version that was used to compile\s+PyTorch "
        r"\((?P<built>[\d.]+)\)",
        _FIT_CUDA,
    ),
    # torch/library.py and torchvision/extension.py
    Rule(
        FailureClass.DEPENDENCY_INSTALL,
        r"operator torchvision::\w+ does not exist|No such operator torchvision::|Couldn't load custom C\+\+ ops",
        _FIT_TORCHVISION,
    ),
    # transformers/models/auto/configuration_auto.py
    Rule(
        FailureClass.DEPENDENCY_INSTALL,
        r"has model type `(?P<type>[^`]+)` but Transformers does not recognize",
        "The installed Transformers does not know models of the type {type}, most often because it is too old: raise "
        "transformers in [code.requirements].",
    ),
    # google/protobuf/descriptor.py
    Rule(
        FailureClass.DEPENDENCY_INSTALL,
        r"Descriptors cannot (?:not )?be created directly",
        "A package has code that an older protobuf has generated: pin protobuf<=3.20.3 in [code.requirements], or raise the "
        "package in which the traceback ends.",
    ),
    # numpy/core/_multiarray_umath.py, which also prints it where the program can go on without the module.
    Rule(
        FailureClass.DEPENDENCY_INSTALL,
        r"compiled using NumPy 1\.x|_ARRAY_API not found|numpy\.core\.multiarray failed to import",
        "A package was built for NumPy 1, and NumPy 2 is installed: pin numpy<2 in [code.requirements], or raise the package "
        "in which the traceback ends.",
        Causality.SYMPTOM,
    ),
    # The system's loader. Libraries of CUDA and PyTorch belong to packages, other ones to the system.
    Rule(
        FailureClass.DEPENDENCY_INSTALL,
        r"^ImportError: (?P<library>lib(?:GL|EGL|gthread|SM|Xext|Xrender|X11)\b[\w.-]*): cannot open shared object file",
        _USE_HEADLESS,
    ),
    Rule(
        FailureClass.DEPENDENCY_INSTALL,
        r"^(?:ImportError|OSError): (?P<library>lib(?!cu|nv|nccl|torch|c10|tensor|caffe|nppc|mpi|fabric)[\w+-]+\.so[\d.]*): "
        r"cannot open shared object file",
        _INSTALL_LIBRARY,
    ),
    Rule(
        FailureClass.DEPENDENCY_INSTALL,
        r"^(?:ImportError|OSError): .*version `(?P<version>(?:GLIBC|GLIBCXX|CXXABI)_[\d.]+)' not found",
        _FIT_SYSTEM,
    ),
    Rule(
        FailureClass.DEPENDENCY_INSTALL,
        r"^ImportError: .*(?:cannot open shared object file|undefined symbol|version `|incompatible)"
        r"|^OSError: \S*\.so[\d.]*: (?:cannot open shared object file|undefined symbol)"
        r"|^(?:[\w.]*)PackageNotFoundError|VersionConflict",
        _PIN_VERSIONS,
    ),
    # transformers/utils/versions.py
    Rule(
        FailureClass.DEPENDENCY_INSTALL,
        r"(?P<wanted>[\w-]+[<>=!~][\w.,<>=!~*]*) is required for a normal functioning of this module, but found "
        r"(?P<found>[\w-]+==\d[\w.]*\w)",
        "Installed is {found}, and a package needs {wanted}: name {wanted} in [code.requirements].",
    ),
    # Packages that ask for others in words of their own: transformers, pandas, Lightning.
    Rule(
        FailureClass.DEPENDENCY_INSTALL,
        r"pip install (?:-U|--upgrade) [\"'`]?(?P<package>[A-Za-z][\w-]*)",
        _RAISE_PACKAGE,
    ),
    *(Rule(FailureClass.DEPENDENCY_INSTALL, pattern, _ADD_PACKAGE) for pattern in _ASKED_PACKAGES),
    # Python names the file of the module, which may be an installed package or a part of Python itself.
    Rule(
        FailureClass.DEPENDENCY_INSTALL,
        rf"cannot import name '(?P<name>\w+)' from '(?P<module>[\w.]+)' \(\S*{_PACKAGES}",
        "The installed {module} has no {name}: pin in [code.requirements] a version that has it, or another version of the "
        "package that imports it.",
    ),
    Rule(
        FailureClass.DEPENDENCY_INSTALL,
        r"cannot import name '(?P<name>\w+)' from '(?P<module>[\w.]+)' \(\S*/lib/python(?P<python>3\.\d+)/",
        "{module} of Python {python} has no {name}: it was written for another one. Raise in [code.requirements] the package that "
        "imports it.",
    ),
    # Not of torch._C, which lacks what a build for the CPU has not.
    Rule(
        FailureClass.DEPENDENCY_INSTALL,
        r"^AttributeError: module '(?P<module>(?!torch\._C)[\w.]+)' has no attribute '(?P<name>\w+)'(?!.*consider renaming)",
        _FIT_ATTRIBUTE,
        raised_in=_PACKAGES,
    ),
    Rule(
        FailureClass.DEPENDENCY_INSTALL,
        r"^(?:ImportError|AttributeError|TypeError|NameError|SyntaxError): ",
        _FIT_VERSIONS,
        raised_in=_PACKAGES,
        in_import=True,
    ),
    # A library calls what the job's code has given it, or another package.
    Rule(
        FailureClass.USER_CODE,
        r"^TypeError: (?P<called>[\w.<>]+)\(\) got an unexpected keyword argument '(?P<key>\w+)'",
        "A package has called {called} with {key}, which it does not accept. If {called} or {key} comes from the job's code, "
        "fix it there; else two packages do not fit each other: pin in [code.requirements] versions "
        "that do.",
        raised_in=_PACKAGES,
    ),
)
