# Two commands do everything: `make demo` (a real comparison with a report) and `make test` (all checks).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: install demo test lint types layers unit fmt bench clean

install: $(STAMP)

# Installed again only when what is installed changes.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; ok = (3, 11) <= sys.version_info[:2] < (3, 14); sys.exit(None if ok else "fedsparse needs Python 3.11 to 3.13, %s is %s: say make PYTHON=python3.11" % (sys.executable, sys.version.split()[0]))'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV) (about a minute; torch and ray are large) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt "torch" "setuptools"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

demo: install
	@$(BIN)/fedsparse compare quickstart --out runs/quickstart --overwrite

test: lint types layers unit

lint: install
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: install
	@$(BIN)/mypy

layers: install
	@$(BIN)/lint-imports

unit: install
	@$(BIN)/python -m pytest -n $$(nproc 2>/dev/null || echo 2) --dist loadgroup

fmt: install
	@$(BIN)/ruff check --fix --quiet . || true
	@$(BIN)/ruff format --quiet .

clean:
	rm -rf $(VENV) runs build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
