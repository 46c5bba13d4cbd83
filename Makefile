# Every target works from a bare checkout: what it needs is installed first, into .venv.
# PYTHON names the interpreter (3.10 or newer, with venv); TORCH the PyTorch to install, and TORCH_INDEX_URL the index
# that it alone comes from, such as PyTorch's own of builds for the CPU. PIP_INDEX_URL would be asked for the rest, too.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:

PYTHON ?= python3
TORCH ?= torch==2.13.0
TORCH_INDEX_URL ?=
# What `make test-torch` tests with, and which tests.
OTHER ?= torch==2.6.0
SPINE ?= unit/agent unit/elastic integration/test_membership.py integration/test_staying.py integration/test_session.py \
	integration/test_torchrun.py integration/test_run_ahead.py integration/test_memory.py integration/zero
SEED ?= 1
# Whose dalsegno the simulator runs: the checkout's, or the wheel's.
SIMULATOR ?= $(PY)
RUNS ?= 1000
# The same with the shells: driver, client, threads, loops.
SHELL_RUNS ?= 30
# Embedded masters and their claims, on machines and in containers.
CLAIM_RUNS ?= 50
# Several masters over etcd.
LEADER_RUNS ?= 30
COUNT ?= 1000
# Process tests wait for a third of their time. Each pytest process has its share of them, and helps the others out at the
# end: two more of them than cores keep two cores busy.
TEST_JOBS ?= 4
check: TEST_JOBS = 2

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Python compiles what is imported; compiling all of torch and its like takes pip a minute.
export PIP_NO_COMPILE := 1
# Rewriting the tests' assertions takes each pytest process 10 s, once where it may keep what comes out of it.
unexport PYTHONDONTWRITEBYTECODE
# Two ranks or more share the cores: one thread each. CPU tests stay CPU tests where there is a GPU.
export OMP_NUM_THREADS ?= 1
export DS_ACCELERATOR ?= cpu
# DeepSpeed's compiled extensions of two environments break each other in the shared default directory.
export TORCH_EXTENSIONS_DIR ?= $(CURDIR)/build/torch_extensions

VENV := $(CURDIR)/.venv
PY := $(VENV)/bin/python
FOLDERS := agent elastic master protos relay swift_plugin
FARM := $(addprefix build/typing/dalsegno/,$(FOLDERS))
TORCH_INDEX = $(if $(TORCH_INDEX_URL),--index-url '$(TORCH_INDEX_URL)')
PROTO_VENV := $(CURDIR)/build/venv-protos
WHEEL_VENV := $(CURDIR)/build/venv-wheel
# Once, before several processes would do it at the same time.
COMPILED := $(PY) -c 'import torch._dynamo, deepspeed' >/dev/null 2>&1 || $(PY) -c 'import torch, deepspeed'
# It runs outside the checkout's root, so that Python finds nothing in the current directory.
PYTEST = mkdir -p build/run && cd build/run && DALSEGNO_TEST_WHEEL=1 DALSEGNO_WHEEL="$$(echo $(CURDIR)/build/wheel/*.whl)" \
	DALSEGNO_PROTO_PYTHON=$(PROTO_VENV)/bin/python PATH="$(WHEEL_VENV)/bin:$$PATH" \
	$(WHEEL_VENV)/bin/python -m pytest -c $(CURDIR)/setup.cfg --rootdir $(CURDIR) -p no:cacheprovider -n $(TEST_JOBS) --dist worksteal --durations=60 $(CURDIR)/tests

.PHONY: help install check test test-all test-torch test-kind demo demo-relay simulate fuzz bench test-gpu bench-gpu lint format protos manifests wheel tools farm clean

help:
	@echo 'make demo      a job of one to four nodes on this machine: joins, a kill, a leave; then the undisturbed run, and a report'
	@echo 'make demo-relay    one run, two pods: the first one is killed, the other one goes on; milestones on a hub'
	@echo 'make check     lint, types, most unit tests and 200 simulated schedules, in under two minutes: for while you work'
	@echo 'make test      lint, types, 1,000 simulated schedules, fuzzers and all but the long tests once, against the built wheel'
	@echo 'make test-all  the full matrices, 100,000 schedules, fuzzers with 100,000 inputs, every process test 20 times (hours; an interrupted run goes on where it was)'
	@echo 'make test-torch OTHER=torch==2.6.0    the spine under another version of PyTorch'
	@echo 'make test-kind    the Dockerfiles and manifests in a cluster of kind; needs docker, kind and kubectl'
	@echo 'make simulate SEED=1 RUNS=1000    simulated schedules only'
	@echo 'make fuzz SEED=1 COUNT=1000       hostile calls, worker frames, orders and damages only'
	@echo 'make bench     the benchmarks'
	@echo 'make test-gpu PYTHON=...          what must be true on a card, with a Python that has the CUDA build of PyTorch (docs/gpu.md)'
	@echo 'make bench-gpu PYTHON=...         what a change of the world costs there'
	@echo 'make lint      ruff and mypy;  make format  rewrites;  make protos  regenerates protos/*_pb2*'

install: $(VENV)/.installed

# PyTorch by itself and pinned: with it in place nothing pulls a newer build.
$(VENV)/.torch:
	@command -v $(PYTHON) >/dev/null || { echo "error: no $(PYTHON): install Python 3.10 or newer, or pass PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "error: $(PYTHON) is older than 3.10: pass PYTHON=..." >&2; exit 1; }
	@$(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV) || \
		{ echo "error: $(PYTHON) has no venv: install the package python3-venv" >&2; exit 1; }
	@echo "installing into .venv (PyTorch first, then the rest)"
	$(PY) -m pip install --quiet $(TORCH_INDEX) '$(TORCH)'
	@touch $@

# What a training needs; the demo asks for no more.
$(VENV)/.trains: $(VENV)/.torch setup.cfg pyproject.toml constraints.txt
	$(PY) -m pip install --quiet -c constraints.txt -e '.[train]'
	@$(COMPILED)
	@touch $@

# And what a relayed run needs.
$(VENV)/.relays: $(VENV)/.trains
	$(PY) -m pip install --quiet -c constraints.txt -e '.[train,relay]'
	@touch $@

$(VENV)/.installed: $(VENV)/.torch setup.cfg pyproject.toml constraints.txt
	@echo "installing what the tests need"
	$(PY) -m pip install --quiet -c constraints.txt -e '.[train,etcd,swift,relay,dev]'
	@$(COMPILED)
	@touch $@ $(VENV)/.trains $(VENV)/.relays

# The generators are pinned: newer ones write code that refuses older protobuf runtimes.
tools: $(PROTO_VENV)/.installed

$(PROTO_VENV)/.installed: $(VENV)/.installed protos/generators.txt
	$(PY) -m venv --clear $(PROTO_VENV)
	$(PROTO_VENV)/bin/python -m pip install --quiet -r protos/generators.txt
	@touch $@

protos: $(PROTO_VENV)/.installed
	PYTHON=$(PROTO_VENV)/bin/python protos/generate.sh

# Static checkers read the packages under their import root (docs/decisions/0001-package-mapping.md).
farm: $(FARM)

$(FARM): build/typing/dalsegno/%:
	@mkdir -p $(@D)
	@ln -sfn ../../../$* $@

lint: $(VENV)/.installed $(FARM)
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m mypy build/typing/dalsegno tests/gpu benchmarks/gpu.py benchmarks/gpu_rank.py

format: $(VENV)/.installed
	$(PY) -m ruff check --fix
	$(PY) -m ruff format

# What `dalsegno render` prints for the jobs in deploy/.
manifests: $(VENV)/.installed
	@cd deploy/kubernetes && $(VENV)/bin/dalsegno render k8s base/job.yaml --output base
	@cd deploy/kubernetes && for one in overlays/*; do \
		$(VENV)/bin/dalsegno render k8s $$one/job.yaml --base base/job.yaml --output $$one || exit 1; done
	@for one in slurm systemd; do $(VENV)/bin/dalsegno render $$one deploy/$$one/job.yaml --output deploy/$$one || exit 1; done

# A clean build directory each time: setuptools ships what an older build left in build/lib.
# The wheel's environment borrows the dependencies of .venv by path. A path in a .pth file is not a site directory,
# so the editable hook of .venv isn't run: only the wheel answers to `import dalsegno`.
wheel: $(VENV)/.installed
	@rm -rf build/lib build/bdist.* build/wheel
	$(PY) -m pip wheel --quiet --no-deps --wheel-dir build/wheel .
	@rm -rf build/lib build/bdist.*
	$(PY) -m venv --clear $(WHEEL_VENV)
	$(WHEEL_VENV)/bin/python -m pip install --quiet --no-deps --no-index build/wheel/*.whl
	@# Older Pythons put an old setuptools there, which would hide the one of .venv.
	@$(WHEEL_VENV)/bin/python -m pip uninstall --quiet --yes setuptools 2>/dev/null
	@$(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> "$$($(WHEEL_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/dependencies.pth"

# For while one works: no wheel, no process tests, no unit test that takes a quarter of a second, nothing that imports
# transformers.
check: lint
	$(PY) -m tests.simulation --seed $(SEED) --runs 200
	$(PY) -m pytest tests/unit -q -p no:cacheprovider -n $(TEST_JOBS) --dist worksteal -m 'not slow' \
		--ignore=tests/unit/swift_plugin/hf

simulate: $(VENV)/.installed
	$(SIMULATOR) -m tests.simulation --seed $(SEED) --runs $(RUNS)
	$(SIMULATOR) -m tests.simulation --shells --seed $(SEED) --runs $(SHELL_RUNS)
	$(SIMULATOR) -m tests.simulation --claims --seed $(SEED) --runs $(CLAIM_RUNS)
	$(SIMULATOR) -m tests.simulation --leaders --seed $(SEED) --runs $(LEADER_RUNS)

fuzz: $(VENV)/.installed
	for what in calls frames directives damages; do $(PY) -m tests.fuzz $$what --seed $(SEED) --count $(COUNT); done

# mypy needs one core for as long as pip and the first schedules need the other.
test: $(VENV)/.installed
	@$(MAKE) --no-print-directory lint & linted=$$!; $(MAKE) --no-print-directory wheel tools && \
		$(MAKE) --no-print-directory simulate SIMULATOR=$(WHEEL_VENV)/bin/python && wait $$linted || \
		{ kill $$linted 2>/dev/null; exit 1; }
	$(PYTEST)

# The schedules were all run by `simulate`: the test of the simulator itself needs few.
test test-all: export SIM_RUNS ?= 20
test test-all: export SIM_SHELL_RUNS ?= 2
test test-all: export SIM_CLAIM_RUNS ?= 2
test test-all: export SIM_LEADER_RUNS ?= 2
# Inputs of each fuzzer; the tests themselves say how many are a quick look.
test-all: export FUZZ_COUNT ?= 100000

# It takes hours. Interrupted and given again, it goes on, as long as not a byte of the checkout has changed.
test-all: TREE = $(shell test -z "$$(git status --porcelain 2>&1)" && git rev-parse 'HEAD^{tree}')
test-all: DONE = $(CURDIR)/build/passed/$(TREE)
test-all: lint wheel tools
	@mkdir -p build/passed
	@[ -n "$(TREE)" -a -e "$(DONE).simulated" ] || \
		$(MAKE) --no-print-directory simulate RUNS=100000 SHELL_RUNS=1500 CLAIM_RUNS=5000 LEADER_RUNS=5000 SIMULATOR=$(WHEEL_VENV)/bin/python
	@[ -z "$(TREE)" ] || touch "$(DONE).simulated"
	$(PYTEST) --full --repeat 20 $(if $(TREE),--resume "$(DONE)")

# Its wheel may be gigabytes: most versions come with CUDA. All else is what .venv has.
test-torch: WHEEL_VENV := $(CURDIR)/build/venv-torch
test-torch: wheel tools
	$(WHEEL_VENV)/bin/python -m pip install --quiet $(TORCH_INDEX) '$(OTHER)'
	$(subst $(CURDIR)/tests,$(addprefix $(CURDIR)/tests/,$(SPINE)),$(PYTEST))

demo: $(VENV)/.trains
	$(PY) -m examples.demo

# It has a hub of the tests' own, to which milestones go.
demo-relay: $(VENV)/.relays
	$(PY) -m examples.demo_relay

bench: $(VENV)/.installed
	$(PY) -m benchmarks

# The images and manifests in a cluster of kind, which is deleted afterwards. FLAGS: build arguments of the trainer's image.
test-kind:
	deploy/kind/run.sh $(FLAGS)

# These use the PyTorch of PYTHON as it is, and nothing of .venv. Without a card one line says so.
test-gpu:
	$(PYTHON) -m tests.gpu $(FLAGS)

bench-gpu:
	$(PYTHON) -m tests.gpu --benchmark $(FLAGS)

clean:
	rm -rf build dist .venv *.egg-info .mypy_cache .ruff_cache .pytest_cache
