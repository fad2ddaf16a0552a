# Everything starts from a fresh clone with Python 3.11 to 3.14 and nothing else:
#   make report   report on the sample run and say where to look
#   make test     run the tests (ARGS="-k shards" passes options to pytest)
#   make lint     format, lint, types and generated files
#   make docs     write the generated files again
#   make clean    remove .venv and everything that was built
# PYTHON=/path/to/python3.12 chooses the interpreter, VENV=dir another environment.

SHELL := /bin/sh
VENV ?= .venv
BIN := $(VENV)/bin
SAMPLE := examples/h200-sample
PACKAGES := rundir recorder analysis queries commands exporters importers
SOURCES := $(PACKAGES) tests benchmarks $(wildcard examples)
PIP := $(BIN)/python -m pip --disable-pip-version-check
ARGS ?=

.PHONY: report test lint types docs clean
.DEFAULT_GOAL := report

report: $(VENV)/.installed
	@test -f $(SAMPLE)/run.json || { \
	  echo "$(SAMPLE): is not in this clone, so there is nothing to report on." \
	       "Fetch it with git, or run: $(BIN)/nanalyze report YOUR_RUN_DIR" >&2; exit 1; }
	$(BIN)/nanalyze report $(SAMPLE) --output report
	@echo "Open $(CURDIR)/report/report.html in a browser; it needs no network. The command is $(BIN)/nanalyze."

test: $(VENV)/.installed-dev
	$(BIN)/pytest $(ARGS)

lint: $(VENV)/.installed-dev types
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/python -m nanalyze.rundir.document --check
	$(BIN)/python -m nanalyze.commands.document --check

# mypy follows no import hooks, so the installed names are laid out as links.
types:
	@mkdir -p build/types/nanalyze
	@for package in $(PACKAGES); do ln -sfn "$(CURDIR)/$$package" build/types/nanalyze/$$package; done

docs: $(VENV)/.installed
	$(BIN)/python -m nanalyze.rundir.document
	$(BIN)/python -m nanalyze.commands.document

clean:
	rm -rf $(VENV) build dist report *.egg-info recorder/*.so .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps are newer than pyproject.toml and the C source once the install went through; nothing is installed twice.
$(VENV)/.installed: pyproject.toml recorder/_callbacks.c | $(VENV)/bin/python
	$(PIP) install --quiet --editable .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml recorder/_callbacks.c | $(VENV)/bin/python
	$(PIP) install --quiet --editable '.[dev]'
	@touch $@ $(VENV)/.installed

$(VENV)/bin/python:
	@python="$(PYTHON)"; \
	for name in python3.14 python3.13 python3.12 python3.11 python3 python; do \
	  test -z "$$python" || break; \
	  "$$name" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' \
	    >/dev/null 2>&1 && python="$$name"; \
	done; \
	test -n "$$python" || { \
	  echo "nanalyze needs Python 3.11 to 3.14 with venv; none was found. Install one (on Debian and" \
	       "Ubuntu: apt-get install python3 python3-venv), or name it: make PYTHON=/path/to/python3.12" >&2; \
	  exit 1; }; \
	echo "creating $(VENV) with $$("$$python" --version)"; \
	rm -f $(BIN)/python $(BIN)/python3; \
	"$$python" -m venv $(VENV)
