# Two commands, each complete by itself: `make demo` and `make test`.
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
TORCH := torch==2.13.0

.PHONY: demo test test-long lint check bench clean
.DELETE_ON_ERROR:

$(VENV)/.base: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12) and "ExactSpec needs Python 3.11 or 3.12; say make PYTHON=/path/to/python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/pip install -q $(TORCH) --extra-index-url https://download.pytorch.org/whl/cpu || $(BIN)/pip install -q $(TORCH)
	$(BIN)/pip install -q -e .
	touch $@

$(VENV)/.test: $(VENV)/.base
	$(BIN)/pip install -q -e '.[test]'
	touch $@

demo: $(VENV)/.base
	$(BIN)/exactspec demo

test: $(VENV)/.test
	$(BIN)/ruff check exactspec tests
	$(BIN)/ruff format --check exactspec tests
	$(BIN)/mypy
	$(BIN)/exactspec info smollm2-135m
	-$(BIN)/python tests/e2e/peer_shim.py
	$(BIN)/pytest -m 'not long and not cuda' --durations=15

$(VENV)/.harness: $(VENV)/.test
	$(BIN)/pip install -q -e '.[harness]'
	touch $@

test-long: $(VENV)/.harness
	$(BIN)/pytest -m 'not cuda' --timeout 3600

check: $(VENV)/.base
	$(BIN)/exactspec check smollm2-135m

bench: $(VENV)/.base
	$(BIN)/pip install -q -e '.[bench]'
	$(BIN)/exactspec bench

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
