# Each command is one verb and installs what it needs.
PYTHON ?=  # by default the first supported one on the path
VENV   := .venv
BIN    := $(VENV)/bin
RUN    := $(VENV)/.installed-run
DEV    := $(VENV)/.installed-dev
BUILT  := pyproject.toml hatch_build.py $(wildcard src/rekindle/engine/sampling/*.[ch])
WORKERS ?= 2  # parallel test processes; the tests of a file run in one process

.PHONY: install dev serve test pythons stress check audit fmt lock dist bench trace clients suites docs \
  console console-test
.DEFAULT_GOAL := install

install: $(RUN)     ## build .venv with what a server needs

dev: $(DEV)         ## build .venv with what tests and checks need, and with all extras

$(RUN): requirements.lock $(BUILT)
	@PYTHON="$(strip $(PYTHON))" tools/install.sh run

$(DEV): requirements-dev.lock $(BUILT)
	@PYTHON="$(strip $(PYTHON))" tools/install.sh dev

serve: install      ## serve the default model on http://127.0.0.1:8080
	$(BIN)/rekindle serve $(ARGS)

test: dev           ## run all tests, also with the real model; random and repeated tests in their short form
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

pythons: dev        ## run the tests of files and memory with every other supported Python that is found
	$(BIN)/python tools/pythons.py

stress: dev         ## run random and repeated tests in their long form
	LONG_TESTS=1 $(BIN)/python -m pytest -m long -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

check: dev          ## check format, lint, types and dependencies; changes nothing, needs no network
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_dependencies.py

audit: dev          ## check the locked packages for published vulnerabilities; needs a network
	$(BIN)/uv tool run pip-audit --require-hashes --disable-pip -r requirements-dev.lock

fmt: dev            ## format the code and fix what lint can fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

COMPILE := $(BIN)/uv pip compile pyproject.toml --generate-hashes --universal --no-emit-index-url \
  --no-header --quiet
lock: dev           ## pin all dependencies again, with hashes and without an index host
	$(COMPILE) --extra mlx --extra mlx-vlm --extra otel --extra video --group dev --upgrade -o requirements-dev.lock
	cp requirements-dev.lock requirements.lock  # uv keeps the versions that it finds in the output
	$(COMPILE) --group build -o requirements.lock

dist: install       ## build the wheel of this platform, a pure one, the source archive and checksums
	$(BIN)/python tools/dist.py

bench: dev          ## measure Rekindle and llama.cpp's own server
	$(BIN)/python benchmarks/peers.py $(ARGS)

trace: dev          ## print the modules that take part in one plain chat turn; ARGS=--list names them
	$(BIN)/python tools/turn_trace.py $(ARGS)

docs: dev           ## write the generated pages, and build the documentation site with checked links
	$(BIN)/python -m tools.reference.pages
	$(BIN)/sphinx-build -q -W --keep-going -c tools/site -d build/doctrees . build/docs
	@echo "The site is in build/docs/index.html"

clients: dev        ## run third-party clients against a server; needs npm and a network
	mkdir -p build/clients && cp tools/clients/package.json build/clients
	npm install --prefix build/clients --ignore-scripts --no-package-lock --no-audit --no-fund
	test -x build/clients/aider/bin/aider || $(BIN)/uv venv --quiet --clear --python $(BIN)/python build/clients/aider
	$(BIN)/uv pip install --quiet --python build/clients/aider/bin/python -r tools/clients/requirements.txt
	PYTHONPATH=. $(BIN)/python -m tools.clients.run build/clients $(ARGS)

suites: dev         ## run the tests and programs of other projects; ARGS: see docs/compatibility.md
	mkdir -p build/suites
	test -x build/suites/venv/bin/python || $(BIN)/uv venv --quiet --clear --python $(BIN)/python build/suites/venv
	$(BIN)/uv pip install --quiet --python build/suites/venv/bin/python -r tools/suites/requirements.txt
	PYTHONPATH=. $(BIN)/python -m tools.suites.run build/suites $(ARGS)

console:            ## build the web page from console/ into the package; needs npm and a network
	cd console && npm ci && npm run check && npm run build

console-test: dev   ## test the web page in Chromium, with accessibility; needs npm and a network
	cd console && npm ci
	LONG_TESTS=1 $(BIN)/python -m pytest tests/e2e/test_console.py tests/front/test_console.py $(ARGS)
