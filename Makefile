# Every target sets up what it needs: `make train` and `make test` work in a fresh clone.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TRAIN_READY := $(VENV)/.train-ready
READY := $(VENV)/.ready
ARGS ?=
# Tests of a file share fixtures, and so a worker. Most wait for processes, so that more workers than cores are quicker. `make test WORKERS=0`: one after the other.
WORKERS ?= 3
INSTALL := PYTHONWARNINGS=ignore $(BIN)/pip install --quiet --no-build-isolation -c constraints.txt
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

unexport PYTHONDONTWRITEBYTECODE # or each process that a test starts compiles what it imports

OTHER = .venv-$(@:test-%=%)

STAGES ?=
POLICIES ?= late side_first random in_order
DEVICES ?= 2 1
GPU_TESTS ?= tests

.PHONY: train test test-slow test-all test-gpu-pretended test-oldest test-newest gpu-pack gpu torture zoo mutants check format bench docs installed clean

train: $(TRAIN_READY) ## train the handwritten-digits recipe; more: make train ARGS='trainer.max_duration=2epoch'
	$(BIN)/trainkit fit recipe=digits $(ARGS)

test: $(READY) ## the default tests, a few minutes on two cores
	$(PYTEST) -m "not slow" $(ARGS)

test-slow: $(READY) ## the tests that take longer
	$(PYTEST) -m slow --durations=20 $(ARGS)

test-all: $(READY) ## all tests in one go
	$(PYTEST) --durations=20 $(ARGS)

test-gpu-pretended: $(READY) ## the tests of GPUs, on a CUDA device that is not there; skipped without a compiler
	$(BIN)/python -m tests.pretended_cuda
	for policy in $(POLICIES); do for devices in $(DEVICES); do \
	  TRAINKIT_PRETENDED_CUDA=$$devices:$$policy OMP_NUM_THREADS=1 $(BIN)/python -m tests.pretended_cuda pytest \
	  -n $(WORKERS) --dist loadfile -m gpu $(GPU_TESTS) $(ARGS) || exit 1; done; done

# datasets 5.0, which this transformers would get, makes one shard of all when it shuffles.
test-oldest: RELEASE := torch==2.8.* transformers==4.57.* datasets==4.* lightning==2.5.*
test-newest: RELEASE := torch transformers datasets peft lightning
test-oldest test-newest: ## the default tests with the oldest, or newest, torch and bridges, in .venv-oldest or .venv-newest: 6 GB each
	test -x $(OTHER)/bin/python || $(PYTHON) -m venv $(OTHER)
	grep -vE '^(torch|transformers|lightning|pytorch-lightning|huggingface_hub|tokenizers|datasets|peft|fsspec|s3fs)==' constraints.txt > $(OTHER)/constraints.txt
	$(OTHER)/bin/pip install --quiet --upgrade pip 'setuptools>=77'
	PYTHONWARNINGS=ignore $(OTHER)/bin/pip install --quiet --upgrade --no-build-isolation -c $(OTHER)/constraints.txt $(RELEASE) -e '.[dev]'
	OMP_NUM_THREADS=1 $(OTHER)/bin/python -m pytest -n $(WORKERS) --dist loadfile -m "not slow" $(ARGS)

gpu-pack: $(READY) ## the wheels that `make gpu` needs on a machine without a network, into gpu_pack/
	$(BIN)/python -m tests.gpu.pack

gpu: ## try everything on a real GPU, in stages: make gpu STAGES='install parity' ARGS=--again
	$(firstword $(wildcard $(BIN)/python) $(PYTHON)) -m tests.gpu $(STAGES) $(ARGS)

torture: $(READY) ## 200 kills of a training process, of one that only saves and of ranks, and links that are cut: half an hour or more
	TRAINKIT_KILLS=200 $(BIN)/python -m pytest tests/reliability/test_rank_loss.py tests/reliability/test_torture.py tests/reliability/test_checkpoint_files.py tests/reliability/test_links.py $(ARGS)

zoo: $(READY) ## every task of the zoo under every schedule and strategy, on 2 and 4 ranks: an hour
	TRAINKIT_ZOO=all $(PYTEST) --dist load --maxschedchunk 4 tests/strategies tests/model tests/parity --durations=6 $(ARGS)

mutants: $(READY) ## break FILE in many places, and list what its TESTS do not notice; more places: ARGS='--count 100'
	$(INSTALL) -e '.[mutants]'
	OMP_NUM_THREADS=1 $(BIN)/python tests/mutants.py $(FILE) $(TESTS) $(ARGS)

check: installed ## format, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	cd build/installed && ../../$(BIN)/mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache -p trainkit

format: $(READY) ## put files into the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY) ## the cost of a step; benchmarks/RESULTS.md says how the other tables are made
	$(BIN)/python benchmarks/step_overhead.py $(ARGS)

docs: installed ## the user guide, into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

installed: $(READY) # a copy whose folders are where their import names say, which type checking and the API page need
	rm -rf build
	$(INSTALL) --no-deps --target build/installed .

clean:
	rm -rf $(VENV) build *.egg-info

$(TRAIN_READY): EXTRAS := recipes # what a recipe needs
$(READY): EXTRAS := dev # what the tests need besides
$(TRAIN_READY) $(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip 'setuptools>=77'
	$(INSTALL) -e '.[$(strip $(EXTRAS))]'
	touch $(TRAIN_READY) $@
