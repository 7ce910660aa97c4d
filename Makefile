# Two commands for a fresh machine with Python 3.11 or newer: make demo, make test.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test thorough lint kernels wheel clean

demo: $(VENV)/installed
	$(BIN)/fasim demo

test: $(VENV)/installed-dev
	$(BIN)/python -m pytest -n auto

thorough: $(VENV)/installed-dev
	FASIM_THOROUGH=1 $(BIN)/python -m pytest -n auto

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/fasim gen --all --check
	$(BIN)/clang-format --dry-run --Werror generated/*.cu fasim/emulator/*.h fasim/emulator/*.cpp

kernels: $(VENV)/installed-dev
	$(BIN)/fasim gen --all

wheel: $(VENV)/installed-dev
	$(BIN)/python -m build --outdir dist

clean:
	rm -rf $(VENV) build dist *.egg-info

$(VENV)/installed: setup.cfg pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@
