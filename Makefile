# `make quickstart` and `make test` set up .venv by themselves; nothing else need be installed but Python.

PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# Tests need no network. One process can hold only one set of devices, so each set has a process of its own.
PYTEST := HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=2 $(BIN)/python -m pytest -q

.PHONY: setup quickstart test test-native test-xla test-xla8 tpu-check lint typecheck long-run bench clean

setup: $(READY)

# The stamp is older than setup.cfg when the dependencies may have changed.
$(READY): setup.cfg
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --use-pep517 --editable ".[test,dev]"
	touch $@

# on eight virtual devices of PyTorch/XLA, 32 pairs a step over all of them
quickstart: $(READY)
	PJRT_DEVICE=CPU CPU_NUM_DEVICES=8 $(BIN)/trl-tpu reward --config examples/quickstart.yaml \
		--per_device_train_batch_size 4 --per_device_eval_batch_size 8

test: test-native test-xla test-xla8

# everything that needs no device, and training in plain torch
test-native: $(READY)
	USE_TORCH_XLA=0 $(PYTEST) tests/unit tests/train

# PyTorch/XLA on one CPU device
test-xla: $(READY)
	PJRT_DEVICE=CPU $(PYTEST) tests/xla

# the same on eight virtual CPU devices, and what only several devices can show
test-xla8: $(READY)
	PJRT_DEVICE=CPU CPU_NUM_DEVICES=8 $(PYTEST) tests/xla tests/xla8

# what the trainer runs, through the TPU's own compiler, which needs no TPU
tpu-check: $(VENV)/.ready-tpu
	$(PYTEST) tests/tpu

$(VENV)/.ready-tpu: $(READY)
	$(BIN)/python -m pip install --quiet --use-pep517 --editable ".[tpu,test,dev]"
	touch $@

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

typecheck: $(READY)
	$(BIN)/mypy

# 2,000 steps with saves and evaluations on one XLA:CPU device, in which nothing may grow
long-run: $(READY)
	PJRT_DEVICE=CPU HF_HUB_OFFLINE=1 OMP_NUM_THREADS=2 $(BIN)/python tests/support/long_run.py

# each benchmark in a process of its own
BENCHMARKS := $(sort $(wildcard tests/benchmarks/bench_*.py))
bench: $(READY)
	@test -n "$(BENCHMARKS)" || echo "There is no tests/benchmarks/bench_*.py yet."
	@for module in $(subst /,.,$(basename $(BENCHMARKS))); do \
		echo "== $$module"; $(BIN)/python -m $$module || exit 1; \
	done

clean:
	rm -rf build dist runs *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
