# Two commands do all their own set-up in .venv:  make train (the main job)   make test
PYTHON ?= python3
VENV := .venv
INSTALLED := $(VENV)/.installed
OUTPUT ?= runs/tiny

.PHONY: train test check

train: $(INSTALLED)
	$(VENV)/bin/dflash train --preset tiny --output $(OUTPUT) --overwrite

# one thread a test process: xdist already fills the cores
test: $(INSTALLED)
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n auto

check: $(INSTALLED)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

$(INSTALLED): pyproject.toml constraints-cpu.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11")'
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[dev]' -c constraints-cpu.txt
	touch $@
