PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.stamp
# Processes that share the tests; many tests wait for something, so more than two cores have use for.
WORKERS ?= 3

.DEFAULT_GOAL := help
.PHONY: help setup docs docs-links figures test test-slow test-integrations test-thorough fuzz test-torch check format demo bench bench-network bench-training bench-methods bench-local bench-fsdp bench-federated bench-policies bench-compare bench-plan chaos soak clean clean-kernels

help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP)  ## Install thinwire and its development tools into .venv

$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { \
		echo "No '$(PYTHON)' found: install Python 3.11 or newer, or name one: make setup PYTHON=/path/to/python" >&2; \
		exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "thinwire needs Python 3.11 or newer, '$(PYTHON)' is $$($(PYTHON) --version 2>&1): name another, as in make setup PYTHON=python3.12" >&2; \
		exit 1; }
	@echo "Installing thinwire and its development tools into $(VENV) (the first time takes about two minutes)"
	@$(PYTHON) -m venv $(VENV)
	@$(VENV)/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

# Tests start many processes, each of which would compile all modules if Python kept none.
test: setup  ## Run the tests
	PYTHONDONTWRITEBYTECODE= $(VENV)/bin/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m 'not slow'

test-slow: setup  ## Run the tests that take long: labs, examples, sharded models, memory (two minutes)
	PYTHONDONTWRITEBYTECODE= $(VENV)/bin/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m slow

# In a venv of its own: the frameworks bring some fifty packages.
INTEGRATIONS := .venv-integrations
$(INTEGRATIONS)/.stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(INTEGRATIONS)
	$(INTEGRATIONS)/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[test-integrations]'
	@touch $@

test-integrations: $(INTEGRATIONS)/.stamp  ## Run the tests with real frameworks: Lightning, Accelerate, Trainer, DeepSpeed, Flower, Ray (five minutes, once they are installed)
	$(INTEGRATIONS)/bin/python -m pytest -n 2 --dist loadfile tests/integrations

test-thorough: setup  ## A thousand examples of every property, a million damaged frames (20 minutes)
	$(VENV)/bin/python benchmarks/fuzz.py --frames 1000000
	$(VENV)/bin/python -m pytest -v -m hypothesis --hypothesis-profile=thorough

fuzz: setup  ## Ten million damaged and hostile frames, always the same ones (15 minutes on two cores)
	$(VENV)/bin/python benchmarks/fuzz.py

# What depends on torch, on another release of it: torch's own wheels for that release, so that on
# Linux some gigabytes come along. constraints.txt, which names one release, has no say here.
TORCH_TESTS := contract frames kernels all_reduce feedback ddp ddp_checkpoints ddp_models ddp_wire
test-torch:  ## Run the core of the tests on another torch: make test-torch TORCH=2.6.0
	@test -n '$(TORCH)' || { echo "Name a release of torch, as in make test-torch TORCH=2.6.0" >&2; exit 2; }
	$(PYTHON) -m venv .venv-torch-$(TORCH)
	.venv-torch-$(TORCH)/bin/python -m pip install -qq --disable-pip-version-check 'torch==$(TORCH)' -e '.[dev]'
	.venv-torch-$(TORCH)/bin/python -m pytest $(TORCH_TESTS:%=tests/test_%.py)

check: setup  ## Check formatting, lint and types
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/ruff check
	$(VENV)/bin/mypy
	$(VENV)/bin/basedpyright

format: setup  ## Format the code and apply the safe lint fixes
	$(VENV)/bin/ruff check --fix --exit-zero --quiet
	$(VENV)/bin/ruff format

docs: setup  ## Build the documentation site from docs/ and the docstrings: build/docs/index.html
	$(VENV)/bin/python -m sphinx -W --keep-going -q -j auto -b html -d build/doctrees docs build/docs
	@echo "built: build/docs/index.html"

docs-links: setup  ## Follow the documentation's links to other sites (needs the internet; not in CI)
	$(VENV)/bin/python -m sphinx -q -j auto -b linkcheck -d build/doctrees docs build/links
	@echo "all lead somewhere: build/links/output.txt"

figures: setup  ## Write the figures of README.md and docs/benchmarks.md from the newest records
	$(VENV)/bin/python benchmarks/figures.py

demo: setup  ## Train two models with and without compression on a slow network; writes report/report.html
	$(VENV)/bin/thinwire demo --out report

bench: setup  ## Measure against the performance targets
	$(VENV)/bin/python benchmarks/targets.py

bench-network: setup  ## Measure the collectives on a slow network of this machine's own
	$(VENV)/bin/python benchmarks/collectives.py
	$(VENV)/bin/python benchmarks/hierarchical.py
	$(VENV)/bin/python benchmarks/wan.py

bench-training: setup  ## What thinwire's hook costs a step of DDP; which of PyTorch's own hooks work (ten minutes)
	$(VENV)/bin/python benchmarks/ddp.py
	$(VENV)/bin/python benchmarks/torch_hooks.py

bench-methods: setup  ## Accuracy against bytes for all methods, and what their steps cost (about two hours)
	$(VENV)/bin/python benchmarks/methods.py --workload images
	$(VENV)/bin/python benchmarks/methods.py --workload text --steps 80
	$(VENV)/bin/python benchmarks/methods.py --cost
	$(VENV)/bin/python benchmarks/methods.py --cost --ranks 8 --rounds 9
	$(VENV)/bin/python benchmarks/methods.py --cost --model images
	$(VENV)/bin/python benchmarks/methods.py --cost --model images --ranks 8 --rounds 9

bench-local: setup  ## Loss against bytes of a transformer under AdamW: gradients, updates, local steps (about two hours)
	$(VENV)/bin/python benchmarks/local.py

bench-fsdp: setup  ## Sharded models on slow links: FSDP2, HSDP, loss (about a quarter of an hour)
	$(VENV)/bin/python benchmarks/fsdp.py

bench-federated: setup  ## Federated averaging: accuracy against bytes uploaded (a quarter of an hour)
	$(VENV)/bin/python benchmarks/federated.py

bench-policies: setup  ## The fastest step, a link that changes, too strong a start, a setting for each layer (35 minutes)
	$(VENV)/bin/python benchmarks/policies.py auto
	$(VENV)/bin/python benchmarks/policies.py link
	$(VENV)/bin/python benchmarks/policies.py accuracy
	$(VENV)/bin/python benchmarks/policies.py layers

bench-compare: setup  ## The full comparison on a slow network, with its targets (about 70 minutes)
	$(VENV)/bin/python benchmarks/compare.py
	$(VENV)/bin/python benchmarks/compare.py --workload text
	$(VENV)/bin/python benchmarks/compare.py --workload text --link 100mbit

bench-plan: setup  ## Predicted against measured step times, cell by cell; goes on where it stopped (2 hours)
	$(VENV)/bin/python benchmarks/plan.py --out benchmarks/records/plan.json

chaos: setup  ## Do something to a rank of 500 trainings, check what the others make of it (20 minutes)
	$(VENV)/bin/python benchmarks/chaos.py

soak: setup  ## Many exchanges, steps and groups: memory, threads, descriptors stay flat (10 minutes)
	$(VENV)/bin/python benchmarks/soak.py

clean-kernels: setup  ## Remove the compiled kernels of all builds from the user's cache directory
	$(VENV)/bin/python -c 'from thinwire.kernels import cache; cache.clear()'

clean:  ## Remove everything that make created, .venv included
	rm -rf $(VENV) $(INTEGRATIONS) .venv-torch-* report build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name .git -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
