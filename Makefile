# Each target sets up what it needs: a virtual environment in .venv, filled by plain pip.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready
SELECT = -m "not slow"
COVER =

.PHONY: demo test test-all sanitize bench wheel clean

demo: $(READY)  ## the main job on embedded data
	$(BIN)/einlinear atlas --out demo

test: $(READY)  ## format, lint, types, tests
	$(BIN)/ruff format --check src tests setup.py
	$(BIN)/ruff check src tests setup.py
	$(BIN)/mypy
	$(BIN)/pytest -n 2 $(SELECT) $(COVER)

test-all: SELECT =
test-all: test  ## the same with the slow tests

sanitize: $(READY)  ## the compiled engine on random programs: ASan and UBSan, then TSan
	$(BIN)/python tests/layers/sanitize.py

bench: $(READY)  ## layers against nn.Linear; how long plans, imports and the command line take
	$(BIN)/python tests/bench_structures.py
	$(BIN)/einlinear bench --out demo --widths 512 1024 --repeats 5
	$(BIN)/einlinear bench --out demo/blocks --structures btt --tokens 1024 --repeats 5 --blocks 2
	$(BIN)/einlinear bench --out demo/experts --structures btt --experts 16 --repeats 5

wheel: $(READY)  ## dist/*.whl, one for all Pythons; installed and tried where there is no compiler
	$(BIN)/python tests/check_wheel.py

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf .venv demo build dist .coverage .mypy_cache .pytest_cache .ruff_cache .hypothesis
