# Each target sets up what it needs: a virtual environment in .venv, filled by plain pip.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready
CODE := src tests examples docs/conf.py setup.py
SELECT = -m "not slow"
COVER =

# Tests start many processes: with bytecode kept, each loads torch in half the time.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo docs lint test test-all sanitize sanitize-arm bench bench-search results wheel clean

demo: .venv/demo-ready  ## the main job on embedded data: search for the best structure
	$(BIN)/einlinear search examples/search.toml --out demo/search

docs: .venv/docs-ready  ## the documentation site: build/docs/index.html
	$(BIN)/sphinx-build --fail-on-warning --keep-going --quiet -d build/doctrees docs build/docs
	@echo "open build/docs/index.html"

lint: $(READY)  ## format, lint, types, import contracts, spelling
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/ruff check $(CODE)
	$(BIN)/clang-format --dry-run --Werror src/einlinear/layers/engine/*.[ch] tests/layers/engine/*.[ch]
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/codespell

test: lint  ## the same, and the tests
	$(BIN)/pytest -n 4 --dist loadgroup --no-loadscope-reorder $(SELECT) $(COVER)

test-all: SELECT =
test-all: export EINLINEAR_LAWS = thorough
test-all: test  ## the same with the slow tests

sanitize: $(READY)  ## the compiled engine on random programs: ASan and UBSan, then TSan
	$(BIN)/python tests/layers/engine/sanitize.py

sanitize-arm: $(READY)  ## NEON on random programs, emulated; needs gcc-aarch64-linux-gnu, libc6-dev-arm64-cross, qemu-user-static
	$(BIN)/python tests/layers/engine/sanitize.py --arm --cases 150 --expert-cases 40 --net-cases 30

bench: $(READY)  ## layers against nn.Linear; how long plans, imports and the command line take
	$(BIN)/python tests/bench_structures.py
	$(BIN)/einlinear bench --out demo/speed --widths 1024 4096 --structures btt "btt(rank=4)" kronecker low_rank
	$(BIN)/einlinear bench --out demo/blocks --structures btt --tokens 1024 --repeats 5 --blocks 2
	$(BIN)/einlinear bench --out demo/experts --structures btt --experts 16 --repeats 5

bench-search: $(READY)  ## the search against other methods on tables of runs: docs/results/search.md
	$(BIN)/python -m einlinear.bench.replay.compare --out docs/results

results: $(READY)  ## the paper's findings from the records of the study: docs/results/findings.md
	$(BIN)/python -m einlinear.reproductions.findings.make docs/results/study --out docs/results

wheel: $(READY)  ## dist/*.whl, one for all Pythons; installed and tried where there is no compiler
	$(BIN)/python tests/check_wheel.py

# One environment, filled as far as a target needs: who runs the demo does not wait for test tools.
$(READY): EXTRAS = dev
$(READY): ALSO = .venv/docs-ready .venv/demo-ready
.venv/docs-ready: EXTRAS = docs
.venv/docs-ready: ALSO = .venv/demo-ready
.venv/demo-ready: EXTRAS = cli,plot
$(READY) .venv/docs-ready .venv/demo-ready: pyproject.toml constraints.txt
	test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e ".[$(EXTRAS)]"
	touch $@ $(ALSO)

clean:
	rm -rf .venv demo build dist .coverage .mypy_cache .pytest_cache .ruff_cache .hypothesis
