# On a machine with Python 3.11 or newer and make: `make demo` and `make test` do the rest, in a .venv of their own.
# Another Python: make PYTHON=python3.12 test. Arguments of a program: make demo ARGS="--help".

PYTHON ?= python3
RANKS ?= 2
WORKERS ?= 2
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
# One thread an operator: the tests' ranks are threads and processes already.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help demo test lint fast slow models doctest bench clean distclean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' Makefile

demo: $(VENV)/.installed-demo ## run the demo on RANKS=2 processes; ARGS="..." goes to it
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/torchrun --nproc-per-node $(RANKS) examples/brain.py $(ARGS)

test: lint doctest fast slow ## every check that CI runs

lint: $(VENV)/.installed-dev ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p halofx

doctest: $(VENV)/.installed-dev ## the examples in docstrings
	$(PYTEST) --doctest-modules --pyargs halofx

fast: $(VENV)/.installed-dev ## the tests not marked slow, on WORKERS=2 processes
	$(PYTEST) -n $(WORKERS) -m "not slow and not models" tests $(ARGS)

# Not on several workers: these tests start ranks of their own. Exit code 5: no test is marked slow.
slow: $(VENV)/.installed-dev $(VENV)/.public-ci ## the tests marked slow, with a public network of each family
	$(PYTEST) -m slow tests $(ARGS) || [ $$? -eq 5 ]

models: $(VENV)/.installed-dev $(VENV)/.public-all ## all public networks on all meshes, and docs/models.md; hours
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.public.run tests/public/results.jsonl $(ARGS)
	$(BIN)/python -m tests.public.table

bench: $(VENV)/.installed-dev ## the benchmarks; ARGS="..." goes to them
	$(BIN)/python -m benchmarks $(ARGS)

clean: ## remove caches and build outputs
	rm -rf build dist out *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean ## clean, and remove .venv
	rm -rf $(VENV)

# One stamp an extra, so that `demo` and `test` add to the same .venv and neither installs twice.
$(VENV)/.installed-%: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing halofx[$*] into $(VENV); the first time takes minutes, most of them for PyTorch"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$*]'
	@touch $@

# --no-deps: several of these packages would pull another PyTorch.
$(VENV)/.public-%: tests/public/%.txt | $(VENV)/.installed-dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r $<
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "halofx needs Python 3.11 or newer, and PYTHON=$(PYTHON) is: $$($(PYTHON) --version 2>&1)." >&2; \
	  echo "Name one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV) || { rm -rf $(VENV); exit 1; }
