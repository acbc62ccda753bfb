# `make demo` and `make test` are all a newcomer needs: each creates .venv by itself.
PYTHON ?= python3
BIN := .venv/bin
export OMP_NUM_THREADS ?= 1

.PHONY: demo test test-all lint docs pictures tables package bench reliability clean

.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/pip install --quiet --constraint constraints.txt --group dev --group docs --editable '.[sklearn,data,plot,lightning,tensorboard]'
	touch $@

demo: .venv/.installed
	$(BIN)/varlap demo

test: lint
	$(BIN)/pytest -n 2 --dist worksteal

test-all: lint
	$(BIN)/pytest -n 2 --dist worksteal -m ''

lint: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/pyright

docs: .venv/.installed
	$(BIN)/mkdocs build --strict

# The pictures of the tutorials; about two minutes.
pictures: .venv/.installed
	$(BIN)/python docs/draw_pictures.py

# The tables of the pages, from the committed results.
tables: .venv/.installed
	$(BIN)/python docs/write_tables.py

# Wheel and sdist in dist/; the test installs a wheel into an environment of its own and uses it there.
package: .venv/.installed
	$(BIN)/python -m build --no-isolation --outdir dist .
	$(BIN)/pytest -m slow tests/test_wheel.py

# glibc would give memory back to the system after every step, and take it again.
bench: .venv/.installed
	MALLOC_TRIM_THRESHOLD_=1000000000 MALLOC_MMAP_THRESHOLD_=1000000000 $(BIN)/varlap bench step

# The figures of docs/reliability.md; about ten minutes.
reliability: .venv/.installed
	$(BIN)/python benchmarks/kills.py --kills 50 --out results/reliability/kills.json
	$(BIN)/python benchmarks/guard.py --out results/reliability/guard-cpu.json
	rm -f results/reliability/checkpoints.json
	VARLAP_FIGURES=results/reliability/checkpoints.json $(BIN)/pytest -q -m '' tests/training/test_checkpoint.py tests/training/test_checkpoint_damage.py

clean:
	rm -rf .venv dist site .pytest_cache .ruff_cache .import_linter_cache
