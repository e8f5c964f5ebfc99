# The environment in .venv is made once; it is updated when the files that define it change.
PYTHON ?= python3
SEED ?=
ARGS ?=

VENV := .venv
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help train test lint clean

help:
	@echo "make train   train the small default task: SEED=1 picks the seed, ARGS='--help' lists the settings"
	@echo "make test    run every test without a GPU: ARGS='-k gae' picks some"
	@echo "make lint    check style and format"
	@echo "make clean   remove the environment and the caches; runs/ stays"

train: $(STAMP)
	$(VENV)/bin/vapo train $(if $(SEED),--seed $(SEED)) $(ARGS)

# Two workers on two cores: OpenMP threads that spin for each other would make the suite several times slower.
test: export OMP_NUM_THREADS := 1
test: export OMP_WAIT_POLICY := PASSIVE
test: $(STAMP)
	$(VENV)/bin/python -m pytest -n 2 $(ARGS)

lint: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp is written last, so an installation that was cut short is taken up again.
$(STAMP): setup.py pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	    { echo "error: PYTHON=$(PYTHON) must be Python 3.10 or newer; try 'make PYTHON=python3.11'" >&2; exit 1; }
	@echo 'Installing into $(VENV); this takes a minute or more, once.'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@
