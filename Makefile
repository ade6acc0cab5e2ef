# Each command is one verb and installs what it needs.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.installed
WORKERS ?= 2  # parallel test processes; the tests of a file run in one process

.PHONY: install serve test pythons stress check audit fmt lock bench trace clients suites
.DEFAULT_GOAL := install

install: $(READY)

$(READY): requirements.lock pyproject.toml hatch_build.py $(wildcard src/rekindle/engine/sampling/*.[ch])
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --require-hashes -r requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

serve: install          ## serve the default model on http://127.0.0.1:8080
	$(BIN)/rekindle serve $(ARGS)

test: install           ## run all tests, also with the real model; random and repeated tests in their short form
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

pythons: install        ## run the tests of files and memory with every other supported Python that is found
	$(BIN)/python tools/pythons.py

stress: install         ## run random and repeated tests in their long form
	LONG_TESTS=1 $(BIN)/python -m pytest -m long -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

check: install          ## check format, lint, types and dependencies; changes nothing, needs no network
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_dependencies.py

audit: install          ## check the locked packages for published vulnerabilities; needs a network
	$(BIN)/uv tool run pip-audit --require-hashes --disable-pip -r requirements.lock

fmt: install            ## format the code and fix what lint can fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lock: install           ## pin all dependencies again, with hashes and without an index host
	$(BIN)/uv pip compile pyproject.toml --extra dev --generate-hashes --universal \
	  --no-emit-index-url --no-header --quiet --upgrade -o requirements.lock

bench: install          ## measure Rekindle and llama.cpp's own server
	$(BIN)/python benchmarks/peers.py $(ARGS)

trace: install          ## print the modules that take part in one plain chat turn; ARGS=--list names them
	$(BIN)/python tools/turn_trace.py $(ARGS)

clients: install        ## run third-party clients against a server; needs npm and a network
	mkdir -p build/clients && cp tools/clients/package.json build/clients
	npm install --prefix build/clients --ignore-scripts --no-package-lock --no-audit --no-fund
	test -x build/clients/aider/bin/aider || $(BIN)/uv venv --quiet --clear --python $(BIN)/python build/clients/aider
	$(BIN)/uv pip install --quiet --python build/clients/aider/bin/python -r tools/clients/requirements.txt
	PYTHONPATH=. $(BIN)/python -m tools.clients.run build/clients $(ARGS)

suites: install         ## run the tests of other projects; ARGS="--llama-tests PATH" of a llama.cpp checkout
	mkdir -p build/suites
	test -x build/suites/venv/bin/python || $(BIN)/uv venv --quiet --clear --python $(BIN)/python build/suites/venv
	$(BIN)/uv pip install --quiet --python build/suites/venv/bin/python -r tools/suites/requirements.txt
	PYTHONPATH=. $(BIN)/python -m tools.suites.run build/suites $(ARGS)
