# Two commands to know: `make warmup` and `make test`. Each sets everything up on its first use.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VLLM_VENV := .venv-vllm
CACHE ?= .cache/muse_jit
ARCH ?= sm_90a,sm_103a

.PHONY: setup warmup test check format clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

# The main job: plan Muse Spark at TP8, compile for two architectures into a local cache, list it.
warmup: setup
	$(BIN)/muse-jit warmup --model muse-spark --tp 8 --arch $(ARCH) --cache-dir $(CACHE)
	$(BIN)/muse-cache ls --cache-dir $(CACHE)

test: setup
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not gpu and not multigpu"

# Format, lint, types, import rules and size budgets. `make format` repairs what can be repaired.
check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python tests/check.py

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) $(VLLM_VENV) .cache build *.egg-info

# The store's model test for half an hour: random interleavings of get, kill, damage, prune, deletion, clock steps.
SOAK_MINUTES ?= 30
.PHONY: soak
soak: setup
	cd tests && SOAK_MINUTES=$(SOAK_MINUTES) ../$(BIN)/python -m field.test_model

# The plugin's tests against the real vLLM 0.33.0, without its CUDA parts, in an environment of its own (1.5 GB).
.PHONY: test-vllm
test-vllm: $(VLLM_VENV)/.ready
	$(VLLM_VENV)/bin/python -m pytest -n 2 --dist worksteal tests/with_vllm

$(VLLM_VENV)/.ready: pyproject.toml vllm-requirements.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps vllm==0.33.0 xgrammar==0.2.8 compressed-tensors==0.17.0
	find $(VLLM_VENV)/lib -path '*/vllm/*' -name '*.so' -size +1M -delete
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r vllm-requirements.txt
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $@
