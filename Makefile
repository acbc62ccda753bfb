# `make demo` and `make test` are all a newcomer needs: each creates .venv by itself.
PYTHON ?= python3
BIN := .venv/bin
export OMP_NUM_THREADS ?= 1

.PHONY: demo test test-all lint docs bench clean

.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/pip install --quiet --constraint constraints.txt --group dev --group docs --editable '.[sklearn,data,plot]'
	touch $@

demo: .venv/.installed
	$(BIN)/varlap demo

test: lint
	$(BIN)/pytest -n 2

test-all: lint
	$(BIN)/pytest -n 2 -m ''

lint: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/pyright

docs: .venv/.installed
	$(BIN)/mkdocs build --strict

bench: .venv/.installed
	$(BIN)/varlap bench step

clean:
	rm -rf .venv site .pytest_cache .ruff_cache .import_linter_cache
