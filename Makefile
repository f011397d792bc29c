# `make quickstart` and `make test` set up .venv by themselves; nothing else need be installed but Python.

PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
READY_TPU := $(VENV)/.ready-tpu

# Tests need no network, and compare with the CPU's numbers. A process can hold only one set of devices, so each set has
# a suite of its own, whose files a few processes share: in plain torch three, since many tests there wait for processes
# that they start.
OFFLINE := HF_HUB_OFFLINE=1 CUDA_VISIBLE_DEVICES= TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1
PYTEST := $(OFFLINE) $(BIN)/python -m pytest -q
BY_FILE := --dist loadfile --no-loadscope-reorder
BY_TWO := -n 2 $(BY_FILE)
BY_THREE := -n 3 $(BY_FILE)

.PHONY: setup setup-tpu quickstart test test-fast test-native test-xla test-xla8 test-newest test-long tpu-check torchtpu-check gpu-check \
	lint typecheck long-run bench dist site clean

setup: $(READY)
setup-tpu: $(READY_TPU)

# A stamp is older than setup.cfg when the dependencies may have changed.
# With PyTorch/XLA and the oldest transformers that is allowed; `test-newest` has the newest of all.
$(READY): setup.cfg
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --use-pep517 --editable ".[xla,test,dev]" "transformers==5.23.*"
	touch $@

# with the TPU's compiler; the other environment is part of this one
$(READY_TPU): setup.cfg
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --use-pep517 --editable ".[tpu,test,dev]" "transformers==5.23.*"
	touch $(READY) $@

# on eight virtual devices of PyTorch/XLA, 32 pairs a step over all of them
quickstart: $(READY)
	PJRT_DEVICE=CPU CPU_NUM_DEVICES=8 $(BIN)/trl-tpu reward --config examples/quickstart.yaml \
		--per_device_train_batch_size 4 --per_device_eval_batch_size 8

# every suite runs, whatever fails in another
test: $(READY)
	@failed=; for suite in native xla xla8; do \
		echo "== test-$$suite"; $(MAKE) --no-print-directory test-$$suite || failed="$$failed test-$$suite"; \
	done; \
	if [ -n "$$failed" ]; then echo "failed:$$failed"; exit 1; fi

# everything that needs no device, and training in plain torch
test-native: $(READY)
	USE_TORCH_XLA=0 $(PYTEST) $(BY_THREE) tests/train tests/unit

# what most changes break first
FAST := $(addprefix tests/unit/test_,batch.py packing.py comparisons.py collators.py formats.py tokenize.py \
	bad_config.py parser.py length_stats.py metrics.py verdict.py run_folder.py imports.py api_parity.py adapters.py \
	rankings.py prompts.py traps.py packable.py bad_data.py report.py) \
	$(addprefix tests/train/test_,packed_batches.py rankings.py settings.py process_rewards.py evaluation.py)
test-fast: $(READY)
	USE_TORCH_XLA=0 $(PYTEST) $(BY_THREE) $(FAST)

# PyTorch/XLA on one CPU device
test-xla: $(READY)
	PJRT_DEVICE=CPU $(PYTEST) $(BY_TWO) tests/xla

# on eight virtual CPU devices: what only several can show, and what says something else on them
test-xla8: $(READY)
	PJRT_DEVICE=CPU CPU_NUM_DEVICES=8 $(PYTEST) $(BY_TWO) tests/xla8 tests/xla

# the newest torch and transformers that are allowed, in plain torch: what leans on them most
NEWEST := $(VENV)-newest
NEWEST_TESTS := $(addprefix tests/unit/test_,coupling.py packable.py device_choice.py adapters.py comparisons.py) \
	$(addprefix tests/train/test_,saves_and_resumes.py ranks.py ranks_checkpoints.py settings.py other_models.py)
test-newest: $(NEWEST)/.ready
	$(NEWEST)/bin/trl-tpu env
	$(OFFLINE) $(NEWEST)/bin/python -m pytest -q $(BY_TWO) $(NEWEST_TESTS)

$(NEWEST)/.ready: setup.cfg
	test -x $(NEWEST)/bin/python || $(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet --use-pep517 --editable ".[test]"
	touch $@

# what takes too long for every change: many more kills, layouts, examples and steps
test-long: $(READY) long-run
	USE_TORCH_XLA=0 $(PYTEST) $(BY_TWO) -m long tests/unit tests/train
	PJRT_DEVICE=CPU $(PYTEST) $(BY_TWO) -m long tests/xla
	PJRT_DEVICE=CPU CPU_NUM_DEVICES=8 $(PYTEST) $(BY_TWO) -m long tests/xla8
	USE_TORCH_XLA=0 $(PYTEST) $(BY_TWO) --hypothesis-profile=search tests/unit

# what the trainer runs, through the TPU's own compiler, which needs no TPU
tpu-check: $(READY_TPU)
	$(PYTEST) tests/tpu

# on torch's own device `tpu`, which is this machine's CPU there, in an environment of its own
torchtpu-check:
	PYTHON=$(PYTHON) tests/support/torchtpu_check.sh $(abspath $(VENV))-torchtpu

# on one NVIDIA GPU, in ten minutes without a network; without a GPU a dry run on the CPU
gpu-check: $(READY)
	$(BIN)/python -m tests.gpu.check

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

# the wheel and the source archive, as PyPI checks them
dist: $(VENV)-docs/.ready
	rm -rf dist && $(VENV)-docs/bin/python -m build --quiet
	$(VENV)-docs/bin/twine check --strict dist/*

# README and all guides as one site, in build/site
site: $(VENV)-docs/.ready
	$(VENV)-docs/bin/sphinx-build --quiet --fail-on-warning --keep-going --conf-dir .site . build/site
	cp build/site/README.html build/site/index.html

$(VENV)-docs/.ready:
	$(PYTHON) -m venv $(VENV)-docs
	$(VENV)-docs/bin/python -m pip install --quiet build twine sphinx myst-parser furo
	touch $@

clean:
	rm -rf build dist runs *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
