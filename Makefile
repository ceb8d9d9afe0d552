# Every target sets itself up: a clone, Python >= 3.11 and make are enough (and Java 17 for Spark).
#   make serve ARGS="--port 9000"      what follows ARGS is passed on
#   make test PYTHON=python3.12        the interpreter that .venv is made with

PYTHON ?= python3
ARGS ?=
MINUTES ?= 10
SEEDS ?= 400
FROM ?= 0
VENV := .venv
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.SUFFIXES:

# Spark's workers take any python3 of the PATH unless told; ours has the data source.
export PYSPARK_PYTHON ?= $(CURDIR)/$(BIN)/python

.PHONY: help
help:  ## Show the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: serve
serve: $(VENV)/.has-runtime  ## Run one broker on ./data; ARGS are those of `tidelog serve`
	$(BIN)/tidelog serve --store ./data $(ARGS)

.PHONY: demo
demo: java $(VENV)/.has-demo  ## Produce, consume and query a real data set, with Spark
	$(BIN)/python -m service.demo $(ARGS)

.PHONY: cluster
cluster: $(VENV)/.has-all  ## Run SeaweedFS, three brokers and a balancer here; ARGS are --brokers, --store, --port
	$(BIN)/python -m deploy.local.cluster $(ARGS)

.PHONY: test
test: $(VENV)/.has-all  ## Run the tests; ARGS are those of pytest
	$(BIN)/python -m pytest -n 3 --dist loadgroup $(ARGS)

.PHONY: torture
torture: $(VENV)/.has-all  ## Three brokers and all that can happen to them, for MINUTES
	$(BIN)/python -m pytest -s --timeout 0 tests/system/test_torture.py --torture-minutes $(MINUTES) $(ARGS)

.PHONY: fuzz
fuzz: $(VENV)/.has-all  ## Feed every decoder for MINUTES what it does not expect; ARGS are targets
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --only-binary atheris \
		--editable ".[fuzz]" || true
	$(BIN)/python -m tests.fuzz.run --minutes $(MINUTES) $(ARGS)

.PHONY: test-ui
test-ui: $(VENV)/.has-all  ## Run the console's tests alone, in Debian's chromium
	@command -v chromium >/dev/null || { echo "chromium is needed: apt-get install chromium" >&2; exit 1; }
	$(BIN)/python -m pytest tests/ui $(ARGS)

.PHONY: sim
sim: $(VENV)/.has-all  ## Simulate clusters by seed: SEEDS=2000, FROM=0, or SEED=1234 again; ARGS=--mutations
	@$(BIN)/python -m tests.sim $(if $(SEED),--seed $(SEED),--seeds $(SEEDS) --from $(FROM)) $(ARGS)

.PHONY: lint
lint: $(VENV)/.has-all  ## Check lint, format, types and layers: all of them, even when one fails
	@failed=0; \
	for check in "ruff check" "ruff format --check" mypy "lint-imports --no-logo"; do \
		echo "$$check"; $(BIN)/$$check || failed=1; \
	done; \
	exit $$failed

# What `make test` asks of deploy/ and terraform/ is pure Python; these tools are large, or of other
# languages, and each is asked where it is there or can be had.
.PHONY: lint-deploy
lint-deploy: $(VENV)/.has-all  ## Check deploy/ and terraform/ with promtool, kustomize, Terraform, checkov
	$(BIN)/python -m deploy.lint $(ARGS)

.PHONY: bench
bench: $(VENV)/.has-all  ## Measure; ARGS are those of the bench
	$(BIN)/python -m tests.bench $(ARGS)

.PHONY: format
format: $(VENV)/.has-all  ## Rewrite the code as lint wants it, where that is safe
	$(BIN)/ruff check --fix-only --quiet
	$(BIN)/ruff format

.PHONY: clean
clean:  ## Remove caches and build leftovers; .venv and ./data stay
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis .fuzz
	rm -rf spark-warehouse metastore_db derby.log
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: java
java:
	@java="$${JAVA_HOME:+$$JAVA_HOME/bin/}java"; \
	major=$$("$$java" -version 2>&1 | sed -n 's/.*version "\([0-9]*\).*/\1/p'); \
	[ "$${major:-0}" -ge 17 ] || { echo "Java 17 is needed for Spark (on the PATH, or JAVA_HOME)" >&2; exit 1; }

# The stamps of what .venv holds, older than pyproject.toml when that has changed since. Two makes in two
# terminals take turns: they lock pyproject.toml where there is a flock (Linux).
EXTRAS_runtime :=
EXTRAS_demo := [demo,spark]
EXTRAS_all := [demo,dev,spark]
LOCKED := $(if $(shell command -v flock),flock pyproject.toml)

$(VENV)/.has-%: pyproject.toml
	@[ -x $(BIN)/python ] || $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
		{ echo "Python 3.11 or newer is needed: make PYTHON=/path/to/it" >&2; exit 1; }
	@echo "setting up $(VENV) ($*)"
	@$(LOCKED) sh -ec '[ -x $(BIN)/pip ] || $(PYTHON) -m venv $(VENV); \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".$(EXTRAS_$*)"'
	@touch $@
