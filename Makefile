# One verb a command; every command does its own set-up.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.installed
WORKERS ?= 2  # tests at a time; a file's tests stay together

.PHONY: install serve test stress check audit fmt lock bench clients
.DEFAULT_GOAL := install

install: $(READY)

$(READY): requirements.lock pyproject.toml hatch_build.py $(wildcard src/rekindle/engine/sampling/*.[ch])
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --require-hashes -r requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

serve: install          ## serve the default model on http://127.0.0.1:8080
	$(BIN)/rekindle serve $(ARGS)

test: install           ## every test, on the real model too; chance and repetition in their short form
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

stress: install         ## the tests with chance or repetition in them, in their long form
	LONG_TESTS=1 $(BIN)/python -m pytest -m long -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

check: install          ## format, lint, types and dependencies; changes nothing, needs no network
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_dependencies.py

audit: install          ## ask the public lists of advisories about every locked package
	$(BIN)/uv tool run pip-audit --require-hashes --disable-pip -r requirements.lock

fmt: install            ## format and mend what lint can mend
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lock: install           ## pin every dependency again, with hashes and no index host
	$(BIN)/uv pip compile pyproject.toml --extra dev --generate-hashes --universal \
	  --no-emit-index-url --no-header --quiet --upgrade -o requirements.lock

bench: install          ## measure beside llama.cpp's own server
	$(BIN)/python benchmarks/peers.py $(ARGS)

clients: install        ## real programs of others against a server of their own; needs npm and a network
	mkdir -p build/clients && cp tools/clients/package.json build/clients
	npm install --prefix build/clients --ignore-scripts --no-package-lock --no-audit --no-fund
	test -x build/clients/aider/bin/aider || $(BIN)/uv venv --quiet --clear --python $(BIN)/python build/clients/aider
	$(BIN)/uv pip install --quiet --python build/clients/aider/bin/python -r tools/clients/requirements.txt
	PYTHONPATH=. $(BIN)/python -m tools.clients.run build/clients $(ARGS)
