# Needs python3 (3.11 or newer) and make, and nothing else. Everything is installed into .venv.
SETTINGS := pyproject.toml constraints.txt scripts/install

.PHONY: help quickstart test check build

help:
	@echo "make quickstart   label 500 film reviews with a small model on this machine"
	@echo "make test         the whole test suite; needs no GPU"
	@echo "make check        style, types, layers, version"
	@echo "make build        build the wheel and try it in a new environment"
	@echo
	@echo "PYTHON=python3.12      the Python that makes .venv"
	@echo "TORCH_INDEX=https://download.pytorch.org/whl/cpu      torch without CUDA libraries"

quickstart: .venv/.installed
	.venv/bin/python scripts/quickstart/fetch.py
	.venv/bin/batchgen run jobs/quickstart.yaml
	.venv/bin/python scripts/quickstart/report.py

test: .venv/.installed-dev
	scripts/test

check: .venv/.installed-dev
	scripts/check

build: .venv/.installed-dev
	scripts/build

.venv/.installed: $(SETTINGS)
	scripts/install

.venv/.installed-dev: $(SETTINGS)
	scripts/install dev
