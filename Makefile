# Each target creates or updates .venv first. It needs a clone, Python >= 3.11 and make (and Java 17 for Spark).
#   make serve ARGS="--port 9000"      ARGS has the arguments of the program
#   make test PYTHON=python3.12        PYTHON is the interpreter that creates .venv

PYTHON ?= python3
ARGS ?=
MINUTES ?= 10
SEEDS ?= 400
FROM ?= 0
VENV := .venv
SPARK = $(VENV)/spark-$(VERSION)
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.SUFFIXES:

# By default, Spark's workers run the first python3 of the PATH. This one has the data source.
export PYSPARK_PYTHON ?= $(CURDIR)/$(BIN)/python

# A process that may not write bytecode compiles the modules again: 0.3 s of CPU for each broker.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help
help:  ## Show the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo "The first target installs packages into $(VENV), once: $(SIZE_runtime) for serve and dev,"
	@echo "$(SIZE_demo) for demo, $(SIZE_all) for the others."

.PHONY: serve
serve: has-runtime  ## Run one broker on ./tidelog-data; ARGS are those of `tidelog serve`
	$(BIN)/tidelog serve $(ARGS)

.PHONY: dev
dev: has-runtime  ## Run one broker on ./tidelog-data with live data, and open the console
	$(BIN)/tidelog dev $(ARGS)

.PHONY: demo
demo: java has-demo  ## Produce, consume and query a real data set, with Spark
	$(BIN)/python -m deploy.demo.demo $(ARGS)
	@echo "next: make dev runs a broker with live data, and keeps it"

.PHONY: cluster
cluster: has-all  ## Run SeaweedFS, three brokers and a balancer here; ARGS are --brokers, --store, --port
	$(BIN)/python -m deploy.local.cluster $(ARGS)

.PHONY: test
test: has-all  ## Run the tests; ARGS are those of pytest
	$(BIN)/python -m pytest -n 4 --dist loadgroup --durations=10 $(ARGS)

# A version of Spark lies beside the environment, whose own is the newest, and comes before it on the path.
# Spark before 4.2 leaves the sockets of its results to Python's collector.
SPARKS_WARNINGS := -W "ignore:unclosed <socket:ResourceWarning" -W ignore::pytest.PytestUnraisableExceptionWarning
.PHONY: test-spark
test-spark: java has-all  ## Test with another version of Spark: VERSION=3.5; ARGS are those of pytest
	@[ -n "$(VERSION)" ] || { echo "VERSION is needed: make test-spark VERSION=3.5" >&2; exit 1; }
	@[ -e $(SPARK)/.is-complete ] || { echo "installing Spark $(VERSION) into $(SPARK), once: 0.5 GB" && \
		rm -rf $(SPARK) && $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile \
		--target $(SPARK) "pyspark~=$(VERSION).0" && touch $(SPARK)/.is-complete; }
	PYTHONPATH=$(CURDIR)/$(SPARK) $(BIN)/python -m pytest $(SPARKS_WARNINGS) tests/spark $(ARGS)

.PHONY: torture
torture: has-all  ## Run three brokers under injected faults for MINUTES
	$(BIN)/python -m pytest -s --timeout 0 tests/system/test_torture.py --torture-minutes $(MINUTES) $(ARGS)

.PHONY: torture-restores
torture-restores: has-all  ## Run three brokers for MINUTES as they are cloned and their store is restored
	$(BIN)/python -m pytest -s --timeout 0 tests/system/test_restores.py --torture-minutes $(MINUTES) $(ARGS)

.PHONY: fuzz
fuzz: has-all  ## Fuzz each decoder for MINUTES, or the service with INPUTS=1000000; ARGS are targets
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --only-binary atheris \
		--editable ".[fuzz]" || true
	$(BIN)/python -m tests.tools.fuzz.run $(if $(INPUTS),--inputs $(INPUTS),--minutes $(MINUTES)) $(ARGS)

.PHONY: test-ui
test-ui: has-all  ## Run only the tests of the console, in Debian's chromium
	@command -v chromium >/dev/null || { echo "chromium is needed: apt-get install chromium" >&2; exit 1; }
	$(BIN)/python -m pytest tests/ui $(ARGS)

# Clients that PyPI does not have. A client whose tool is not installed, or not downloaded, is skipped.
.PHONY: test-kafka
test-kafka: has-all  ## Test with Kafka clients of Java, Go, npm, Debian (kcat) and Spark; it downloads them
	$(BIN)/python -m pytest -o "python_files=with_*.py" tests/tools/kafka_clients $(ARGS)

# MinIO has no binaries any more: Go builds a commit of February 2026, for minutes. Without Go, the test is skipped.
.PHONY: test-minio
test-minio: has-all  ## Test with MinIO; Go builds it, once, in 2 to 40 minutes
	$(BIN)/python -m pytest -o "python_files=with_*.py" tests/tools/minio $(ARGS)

.PHONY: sim
sim: has-all  ## Simulate clusters by seed: SEEDS=2000, FROM=0, or a single SEED=1234; ARGS=--mutations
	@$(BIN)/python -m tests.sim $(if $(SEED),--seed $(SEED),--seeds $(SEEDS) --from $(FROM)) $(ARGS)

.PHONY: explore
explore: has-all  ## Explore small worlds to the end, within a bound; ARGS=--mutations, "--world small"
	@$(BIN)/python -m tests.explore $(ARGS)

.PHONY: attack
attack: has-all  ## Attack real brokers, and measure memory, stalls and a neighbour; ARGS are --scale, --only, --tree
	$(BIN)/python -m tests.tools.attack $(ARGS)

.PHONY: lint
lint: has-all  ## Check lint, format, types, layers and vocabulary: all, even when one fails
	@failed=0; \
	for check in "ruff check" "ruff format --check" mypy "lint-imports --no-logo" \
			"python -m tests.repo.vocabulary"; do \
		echo "$$check"; $(BIN)/$$check || failed=1; \
	done; \
	exit $$failed

# `make test` checks deploy/ and terraform/ with Python packages alone. These tools are large, or of other
# languages; a tool that is not installed is skipped.
.PHONY: lint-deploy
lint-deploy: has-all  ## Check deploy/ and terraform/ with promtool, Terraform, checkov
	$(BIN)/python -m deploy.lint $(ARGS)

.PHONY: test-alerts
test-alerts: $(VENV)/.has-all  ## Test which alerts fire, with promtool of Debian's package prometheus
	PATH="$${PATH}:$(dir $(PROMTOOL))" $(BIN)/python -m pytest -rs -o "python_files=with_promtool.py" tests/service $(ARGS)

.PHONY: bench
bench: has-all  ## Run the benchmarks, in 45 minutes; ARGS are --quick, --only, --json
	$(BIN)/python -m tests.tools.bench $(ARGS)

.PHONY: limits
limits: has-all  ## Measure a broker up to its limits; ARGS are --quick, --only, --json
	$(BIN)/python -m tests.tools.bench.limits $(ARGS)

.PHONY: bench-peers
bench-peers: has-all  ## Download Apache Kafka by Maven, and measure it beside tidelog
	$(BIN)/python -m tests.tools.bench.peers $(ARGS)

.PHONY: docs
docs: has-all  ## Write the generated pages: API reference, settings, command line, metrics
	$(BIN)/python -m deploy.generate

.PHONY: format
format: has-all  ## Format the code, and apply the safe fixes of ruff
	$(BIN)/ruff check --fix-only --quiet
	$(BIN)/ruff format

.PHONY: clean
clean:  ## Remove caches and build files, but not .venv and ./tidelog-data
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis .fuzz
	rm -rf spark-warehouse metastore_db derby.log
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: java
java:
	@java="$${JAVA_HOME:+$$JAVA_HOME/bin/}java"; \
	major=$$("$$java" -version 2>&1 | sed -n 's/.*version "\([0-9]*\).*/\1/p'); \
	[ "$${major:-0}" -ge 17 ] || { echo "Java 17 is needed for Spark (on the PATH, or JAVA_HOME)" >&2; exit 1; }

# The stamp names the extras that are installed in .venv; a change of pyproject.toml or of the code in C makes it
# outdated. So pip runs only if an extra is missing. Two runs of make at once take turns: they lock pyproject.toml, if the
# machine has flock (Linux).
EXTRAS_runtime := server
EXTRAS_demo := demo server spark
EXTRAS_all := demo dev server spark
SIZE_runtime := 0.5 GB (1 to 2 minutes)
SIZE_demo := 1.1 GB (2 to 4 minutes)
SIZE_all := 2.3 GB (5 to 10 minutes)
STAMP := $(VENV)/.has
LOCKED := $(if $(shell command -v flock),flock pyproject.toml)

.PHONY: has-runtime has-demo has-all
has-runtime has-demo has-all: has-%:
	@$(LOCKED) sh -ec '\
		installed=$$(cat $(STAMP) 2>/dev/null || true); \
		is_complete=$$(find $(STAMP) -newer pyproject.toml -newer storage/codec/native.c 2>/dev/null || true); \
		for extra in $(EXTRAS_$*); do \
			case " $$installed " in *" $$extra "*) ;; *) is_complete=; installed="$$installed $$extra" ;; esac; \
		done; \
		[ -z "$$is_complete" ] || exit 0; \
		[ -x $(BIN)/python ] || $(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" 2>/dev/null || \
			{ echo "Python 3.11 or newer is needed: make PYTHON=/path/to/it" >&2; exit 1; }; \
		echo "setting up $(VENV), once: up to $(SIZE_$*)"; \
		[ -x $(BIN)/pip ] || $(PYTHON) -m venv $(VENV); \
		extras=$$(echo $$installed | tr " " ","); \
		$(BIN)/python -m pip install --disable-pip-version-check --editable ".[$$extras]"; \
		mkdir -p $(VENV)/src/tidelog; for part in storage service compaction; do \
			ln -sfn ../../../$$part $(VENV)/src/tidelog/$$part; done; \
		for part in storage/public/*.py; do ln -sf ../../../$$part $(VENV)/src/tidelog/; done; \
		echo $$installed > $(STAMP)'
