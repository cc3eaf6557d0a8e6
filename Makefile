# `make demo` and `make test` do everything on a fresh machine with Python 3.11 or newer, set-up included.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# Bytecode is kept, whatever the shell says: the tests start hundreds of processes, and each would compile for itself.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo demo-pulsar demo-services pulsar function-wheel prepare compile quick unit quick-check test check bench bench-peers campaign model peer-tests \
	proto go-client java-client lock docs dist image install uninstall clean

demo: $(READY)
	$(BIN)/python -m demo

# The same with a real Pulsar broker as the log, see `pulsar`.
demo-pulsar: $(READY)
	$(BIN)/python -m demo --pulsar

# Two services with databases of their own, killed while they work: examples/shop.
demo-services: $(READY)
	$(BIN)/python -m examples.shop

# A real Pulsar broker until Ctrl-C: that of PULSAR_HOME, else one that Maven fetches. Needs Java 17.
pulsar: $(READY)
	@$(BIN)/python -m pulsar_broker

# The wheel of a Pulsar Function and its wrapper: make function-wheel CODE=my_function.py WHEEL=my-1-py3-none-any.whl
function-wheel: $(READY)
	@$(BIN)/python -m seqdedupe.functions.wheel $(CODE) --output $(WHEEL)

# What tests take from elsewhere, or are quicker with. Without Pulsar its tests are skipped.
prepare: $(READY)
	@$(BIN)/python -m pulsar_broker get || true
	@$(BIN)/python -m tests.spark.class_data
	@$(BIN)/python -m tests.client_conformance.programs

# Bytecode of all there is, the tests as pytest rewrites them, and the kernels: else every worker makes its own.
compile: $(READY)
	@$(BIN)/python -m pytest --collect-only -qq > /dev/null || true

# What a change wants to hear within two minutes: style, types, and the tests that need no process but their own.
quick: $(READY)
	@$(MAKE) -j2 --output-sync=target unit quick-check

unit: $(READY)
	$(BIN)/python -m pytest --tier unit -n 3 --dist loadfile --no-loadscope-reorder -q

quick-check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# All tiers, see tests/tiers.py. TEST_PULSAR=required makes it a failure if there is no Pulsar; so with each service.
test: prepare
	$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder

# Everything that is not a test: style, types, who imports whom, the contract, generated code.
check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	cd proto && ../$(BIN)/buf lint
	BIN=$(abspath $(BIN)) ./proto/generate.sh --check

# Explores all states of the models of the protocol, see docs/internals/model.md. Needs spin and gcc.
model: $(READY)
	$(BIN)/python -m model.check

bench: $(READY)
	$(BIN)/python -m bench

# Beside Kafka, NATS, RabbitMQ Streams and Pulsar, which it fetches: docs/internals/benchmarks.md says what that takes.
bench-peers: $(READY)
	$(BIN)/python -m bench.compare

# What the suite has a small fixed share of: the other cases of families of tests (tests/tiers.py), many examples of properties
# (tests/conftest.py), random histories of a topic, of windows of deduplication IDs with runs on
# disk, mutated bytes, kills in the middle of imports, and while such runs are made, backups under load, webhooks through
# gateways that are killed, kills of services and their databases, and faults of a real Pulsar broker, and of three
# sidecars in front of one; and attacks on a journal's newest file, by clocks that are wrong, and by callers with narrow rights;
# and all states of the models at larger bounds.
CASES ?= 100000
KILLS ?= 300
BACKUPS ?= 100
EDGES ?= 100
FAULTS ?= 300
CRASHES ?= 100
SERVICE_KILLS ?= 100
BAD_SECONDS ?= 300
EVENTS ?= 1000000
SEED ?= $(shell date +%s)
campaign: $(READY)
	$(BIN)/python -m pytest --campaign -n auto --dist loadfile --no-loadscope-reorder
	$(BIN)/python -m tests.kernels tests.property.run --cases $(CASES) --seed $(SEED)
	$(BIN)/python -m tests.kernels tests.property.run --windows --cases $$(($(CASES) / 10)) --seed $(SEED)
	$(BIN)/python -m tests.kernels tests.property.run --traces --cases $(CASES) --seed $(SEED)
	$(BIN)/python -m tests.kernels tests.format.fuzz batches --cases $(CASES)00 --seed $(SEED)
	$(BIN)/python -m tests.kernels tests.format.fuzz records --cases $(CASES)0 --seed $(SEED)
	$(BIN)/python -m tests.kernels tests.pulsar_wire.fuzz rows --cases $(CASES)0 --seed $(SEED)
	$(BIN)/python -m tests.kernels tests.pulsar_wire.fuzz entries --cases $(CASES)0 --seed $(SEED)
	$(BIN)/python -m tests.kernels tests.pulsar_wire.fuzz streams --cases $(CASES)0 --seed $(SEED)
	$(BIN)/python -m tests.broker_sidecar.kill_transfers --kills $(KILLS) --seed $(SEED)
	$(BIN)/python -m tests.kernels tests.broker_sidecar.kill_windows --kills $(KILLS) --seed $(SEED)
	$(BIN)/python -m tests.kernels tests.broker_sidecar.backup_campaign --backups $(BACKUPS) --seed $(SEED)
	$(BIN)/python -m tests.kernels tests.broker_sidecar.door.stock_kills --clients python,java,go --kills $(KILLS) --seed $(SEED)
	$(BIN)/python -m tests.kernels tests.broker_sidecar.door.stock_kills --clients python,java,go --log pulsar --kills $(KILLS) --seed $(SEED)
	$(BIN)/python -m tests.broker_sidecar.bad_company --seconds $(BAD_SECONDS) --seed $(SEED)
	$(BIN)/python -m tests.kernels tests.broker_sidecar.edges_campaign --cases $(EDGES) --seed $(SEED)
	$(BIN)/python -m tests.examples.webhooks --events $(EVENTS) --seed $(SEED)
	$(BIN)/python -m tests.services.kill_campaign --kills $(SERVICE_KILLS) --seed $(SEED)
	$(BIN)/python -m tests.kernels tests.pulsar.campaign --faults $(FAULTS) --seed $(SEED)
	$(BIN)/python -m tests.kernels tests.pulsar.functions_campaign --seed $(SEED)
	$(BIN)/python -m tests.kernels tests.pulsar.crashes --faults $(CRASHES) --seed $(SEED)
	$(BIN)/python -m model.check --large

# The tests of Pulsar's Go client through the door of a sidecar, before a real Pulsar broker. Needs Go and the network.
# Afterwards the suite has a small share of them.
peer-tests: $(READY)
	$(BIN)/python -m tests.kernels tests.pulsar.peer_suite

# Builds the client for Java, and tests it with this sidecar. Needs Maven, JDK 17 and the network.
java-client: $(READY)
	cd clients/java && mvn -B -q package

proto: $(READY)
	BIN=$(abspath $(BIN)) ./proto/generate.sh

# Checks and tests the Go client. Needs Go 1.26; the first time, it fetches the modules of clients/go/go.sum.
go-client: $(READY)
	cd clients/go && test -z "$$(gofmt -l .)" && go vet ./... && go test -race ./...
	BIN=$(abspath $(BIN)) ./clients/go/generate.sh --check

# Pins every dependency again, at its newest version that fits: of all there is, of a sidecar as a service, of a build.
LOCK := $(BIN)/uv pip compile -q --universal --python-version 3.11 --no-header --generate-hashes
lock: $(READY)
	$(LOCK) --all-extras --group dev --group docs --no-annotate pyproject.toml -o requirements.lock
	$(LOCK) --extra sidecar --extra pulsar --extra s3 --extra top --annotation-style line -c requirements.lock pyproject.toml \
		-o deploy/requirements.lock
	echo setuptools | $(LOCK) --no-annotate -c requirements.lock - -o deploy/build.lock

# The site of all pages, with search, in build/site. It loads nothing from other hosts.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

# Wheel and source archive, the same bytes wherever they are built, and whoever does.
BUILDING := build/venv
dist:
	$(PYTHON) -m venv --clear $(BUILDING)
	$(BUILDING)/bin/pip install -q --require-hashes -r deploy/build.lock
	mkdir -p dist
	for what in sdist wheel; do \
		SOURCE_DATE_EPOCH=$${SOURCE_DATE_EPOCH:-$$(git log -1 --format=%ct)} PYTHONPATH=deploy \
			$(BUILDING)/bin/python -c "import reproducible; reproducible.build_$$what('dist')" > /dev/null || exit 1; \
	done

# The image of deploy/Containerfile, with whichever builder there is.
BUILDER ?= $(or $(shell command -v podman),$(shell command -v docker))
image:
	$(BUILDER) build -f deploy/Containerfile -t seqdedupe .

# A service of this machine, see docs/guides/deployment.md. DESTDIR is where all of it goes instead of /, for packages.
PREFIX ?= /usr/local
SYSCONFDIR ?= /etc
LIBRARY = $(PREFIX)/lib/seqdedupe
INSTALL = $(BUILDING)/bin/pip --python $(DESTDIR)$(LIBRARY)/bin/python install -q --no-compile
install: dist
	$(PYTHON) -m venv --clear --without-pip $(DESTDIR)$(LIBRARY)
	$(INSTALL) --require-hashes -r deploy/requirements.lock
	$(INSTALL) --no-deps --no-index dist/seqdedupe-*.whl
	$(DESTDIR)$(LIBRARY)/bin/python -m compileall -q -j 0 -x /tests/ -s "$(DESTDIR)" $(DESTDIR)$(LIBRARY)/lib
	# What pip wrote says where it is now, and not where it will be.
	$(if $(DESTDIR),grep -rlIF "$(DESTDIR)" $(DESTDIR)$(LIBRARY)/bin $(DESTDIR)$(LIBRARY)/pyvenv.cfg | xargs -r sed -i "s|$(DESTDIR)||g")
	# For this machine. Where a package is made it is another one: the package runs this when it is installed.
	$(if $(DESTDIR),,$(LIBRARY)/bin/seqdedupe compile)
	install -d $(DESTDIR)$(PREFIX)/bin $(DESTDIR)$(PREFIX)/share/doc/seqdedupe
	ln -sf ../lib/seqdedupe/bin/seqdedupe $(DESTDIR)$(PREFIX)/bin/seqdedupe
	install -D -m 644 deploy/sysusers.conf $(DESTDIR)$(PREFIX)/lib/sysusers.d/seqdedupe.conf
	install -d $(DESTDIR)$(PREFIX)/lib/systemd/system
	for unit in seqdedupe seqdedupe-backup; do \
		sed "s|@PREFIX@|$(PREFIX)|; s|@SYSCONFDIR@|$(SYSCONFDIR)|" deploy/$$unit.service.in \
			> $(DESTDIR)$(PREFIX)/lib/systemd/system/$$unit.service || exit 1; \
		chmod 644 $(DESTDIR)$(PREFIX)/lib/systemd/system/$$unit.service; \
	done
	install -m 644 deploy/seqdedupe-backup.timer $(DESTDIR)$(PREFIX)/lib/systemd/system
	for page in $$(cd docs && find . -type f); do \
		install -D -m 644 docs/$$page $(DESTDIR)$(PREFIX)/share/doc/seqdedupe/$$page || exit 1; \
	done
	install -D -m 644 deploy/logrotate.conf $(DESTDIR)$(SYSCONFDIR)/logrotate.d/seqdedupe
	test -e $(DESTDIR)$(SYSCONFDIR)/seqdedupe/seqdedupe.toml || \
		install -D -m 644 deploy/seqdedupe.toml $(DESTDIR)$(SYSCONFDIR)/seqdedupe/seqdedupe.toml
	@echo "Now: systemd-sysusers && systemctl daemon-reload && systemctl enable --now seqdedupe"

# What the service has written, its configuration and its user stay.
uninstall:
	rm -rf $(DESTDIR)$(LIBRARY) $(DESTDIR)$(PREFIX)/share/doc/seqdedupe
	rm -f $(DESTDIR)$(PREFIX)/bin/seqdedupe $(DESTDIR)$(PREFIX)/lib/sysusers.d/seqdedupe.conf \
		$(DESTDIR)$(PREFIX)/lib/systemd/system/seqdedupe.service $(DESTDIR)$(SYSCONFDIR)/logrotate.d/seqdedupe \
		$(DESTDIR)$(PREFIX)/lib/systemd/system/seqdedupe-backup.service \
		$(DESTDIR)$(PREFIX)/lib/systemd/system/seqdedupe-backup.timer

$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python 3.11 or newer is needed: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --require-hashes -r requirements.lock
	$(BIN)/pip install -q --no-deps --no-build-isolation -e .
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info spark/*.egg-info
