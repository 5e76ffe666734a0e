# On a Debian machine with Go, as root, `make demo`, `make test` and `make test-hard`
# install and build everything that they need. Logs go to stderr; with -s, and JSON=1
# for the demo, stdout has only what was asked for.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := build

# Where kernels, images and VMs of the demo and of the tests are. The program's own
# default is /var/lib/drowse.
STATE ?= $(CURDIR)/.cache/state
# Where checkouts share the kernel that they build, which takes 8 to 18 minutes of processor time. KERNEL_SHARE= is nowhere.
KERNEL_SHARE ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/drowse
PREFIX ?= /usr/local
VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo unknown)
COMMIT ?= $(shell git describe --always --abbrev=40 --exclude '*' --dirty=+dirty 2>/dev/null || echo unknown)

# What the guests of the demo and of the tests run.
IMAGE_FROM ?= debian:bookworm
IMAGE_INCLUDE ?= python3
IMAGE_TAG ?= debian-python:latest

# What the guest of test-workloads runs, and under which name. npm is some 400 packages of Debian's, without what they recommend.
WORKLOADS_INCLUDE ?= git,python3,python3-pip,nodejs,npm,golang-go,sqlite3,podman,crun,netavark,iptables,nftables
WORKLOADS_TAG ?= drowse-workloads

# Packages whose tests run with the race detector: it makes them several times slower,
# so those that build things or run guests for long do without.
# Those that take longest come first, here and among the others: one that is left over at the end has one of the
# machine's processors to itself.
RACE_PKGS ?= ./snapshot/... ./vmm/... ./rootfs/disk/... ./guest/... ./devices/... ./rootfs/volume/...
LONG_PKGS ?= ./sandbox ./sandbox/cluster ./netpolicy/link ./sandbox/instance ./sandbox/build ./cmd/drowse ./rootfs/image/builder ./examples/embed
# How often the busy guest of a test sleeps: make life-proofs has 200 sleeps.
export DROWSE_TEST_CYCLES ?= 10
# Packages whose tests run on a KVM of the hardware kind as well.
HARD_PKGS ?= ./sandbox/...
# Which of their tests: others take too long there.
HARD_RUN ?= -run 'TestSleep_and_wake|TestMany_sleeps|TestWith_clones'
TEST_FLAGS ?= -timeout 3h -p 3
HARD_FLAGS ?= -timeout 3h -parallel 1

GOLANGCI := github.com/golangci/golangci-lint/v2/cmd/golangci-lint@v2.15.0

# Built alike, so that what they have in common is compiled once.
GO_BUILD := CGO_ENABLED=0 go build -trimpath -buildvcs=false
GO_TEST := CGO_ENABLED=0 go test -trimpath
LDFLAGS := -s -w -X main.buildVersion=$(VERSION) -X github.com/drowse-vm/drowse/bench.Commit=$(COMMIT)
DROWSE := bin/drowse --state $(STATE)
REPORT := bin/testreport
# Tests that may be skipped where $CI is set, for reasons that lie in themselves: inputs
# of fuzzing that are too long to be of use, and a guest that writes more than an interpreted kernel can: .ci/run has it
# in test-hard. test-mcp has the package of npm that another needs.
MAY_SKIP ?= devices/vsock\.FuzzPackets/|sandbox\.TestAttack_full_host_disk_pauses|cmd/drowse\.TestMCP_serves_the_npm_client$(if $(DROWSE_TEST_BRIEF),|$(LONG_TESTS))
# What DROWSE_TEST_BRIEF leaves out.
LONG_TESTS := sandbox/cluster\.TestGuest_moves|sandbox\.(TestHooks_in_a|TestVolumes_live|TestDisk_snapshots_of|TestSleep_and_wake.*2_vCPUs)|sandbox/build\.TestBuild_of_steps

# For the demo, and for tests that have a guest.
export DROWSE_STATE = $(STATE)
export DROWSE_TEST_STATE = $(STATE)
export DROWSE_AGENT = $(CURDIR)/bin/drowse-agent
export DROWSE_HWKVM_CACHE ?= $(CURDIR)/.cache/hwkvm
# The kernel's tests build and fetch in the same cache.
export DROWSE_TEST_KERNEL_CACHE ?= $(STATE)
# Tests that have guests end with this make, however it ends: internal/test/guesttest.
export GUESTTEST_PROCESS := $(shell echo $$PPID)
# The suite that the test of Debian images builds.
export DROWSE_TEST_DEBIAN ?= bookworm

.PHONY: build
build: check-go
	@$(GO_BUILD) -ldflags '$(LDFLAGS)' -o bin/drowse ./cmd/drowse >&2
	@$(GO_BUILD) -ldflags '-s -w' -o bin/drowse-vmm ./cmd/drowse-vmm >&2
	@$(GO_BUILD) -ldflags '-s -w' -o bin/drowse-agent ./cmd/drowse-agent >&2
	@$(GO_BUILD) -ldflags '-s -w' -o bin/drowse-peer-guest ./cmd/drowse-peer-guest >&2

.PHONY: check-go
check-go:
	@scripts/check-go

# kernel and image build what guests need, or find it in the cache.
.PHONY: kernel image kernel-debian
# The program looks for the kernel first, and installs compilers only if it has to build one.
kernel: build
	@$(DROWSE) kernel build --install-deps --share "$(KERNEL_SHARE)" >&2

kernel-debian: build
	@$(DROWSE) kernel fetch --update-index >&2

image: build
	@scripts/deps image
	@$(DROWSE) image build --from $(IMAGE_FROM) --include $(IMAGE_INCLUDE) --tag $(IMAGE_TAG) --install-deps >&2

# test-state is what tests that have a guest need; they find it by $DROWSE_TEST_STATE.
.PHONY: test-state
test-state: build kernel kernel-debian image

.PHONY: demo
demo: build kernel image
	@scripts/deps demo
	@$(DROWSE) demo $(if $(JSON),-o json)

# test runs all tests on this machine's KVM. The race detector would wait for a second at the end of each process, of which some tests start dozens.
# Packages with tests that try fewer cases under it run without it as well: see internal/test/racetest.
.PHONY: test
test: test-state $(REPORT)
	@scripts/deps test hard
	@scripts/deps bpf || echo "the eBPF objects are not compared with their source" >&2
	@echo "== tests with the race detector, $$(date +%T)" >&2
	@GORACE=atexit_sleep_ms=50 go test -json -race $(TEST_FLAGS) $(RACE_PKGS) | $(REPORT) -allow '$(MAY_SKIP)'
	@echo "== tests without it, $$(date +%T)" >&2
	@$(GO_TEST) -json $(TEST_FLAGS) $(LONG_PKGS) $$(grep -rl --include='*_test.go' --exclude-dir=.cache internal/test/racetest . | xargs -n 1 dirname | sort -u) $$(comm -23 <(go list ./... | sort) <(go list $(RACE_PKGS) ./internal/test/hwkvm | sort)) | $(REPORT) -allow '$(MAY_SKIP)'
	@echo "== tests of the controller for Kubernetes" >&2
	@cd kubernetes && $(GO_TEST) -json $(TEST_FLAGS) ./... | $(CURDIR)/$(REPORT)

# test-unit runs what needs no guest: no kernel, image, network and package to install. Tests say why they are skipped.
.PHONY: test-unit
test-unit: check-go $(REPORT)
	@unset CI DROWSE_TEST_STATE DROWSE_TEST_KERNEL_CACHE DROWSE_TEST_DEBIAN; \
	$(GO_TEST) -json -short -p 4 -timeout 10m ./... | $(REPORT)

# scale-sim simulates hosts that fail, with the ledger's own code, for many steps, and then 10,000 hosts of which a third dies, on a store with the
# limits of S3: seven minutes and 1 GiB. SEED is that of the first 5,000 steps. Less: make scale-sim STEPS=100000 SIM_HOSTS=1000 SIM_WAKES=100.
.PHONY: scale-sim
scale-sim: check-go
	DROWSE_SIM_STEPS=$(or $(STEPS),10000000) DROWSE_SIM_SEED=$(or $(SEED),1) $(GO_TEST) -count 1 -timeout 3h -v -run TestSim ./sandbox/archive/ledger
	DROWSE_SIM_HOSTS=$(or $(SIM_HOSTS),10000) DROWSE_SIM_WAKES=$(or $(SIM_WAKES),1000) DROWSE_SIM_SANDBOXES=1000000 $(GO_TEST) -count 1 -timeout 1h -v -run TestScale ./sandbox/archive/ledger

# test-attacks runs the tests alone that do what an attacker would do, and says of each what came of it. `make test` runs and lists them as well.
.PHONY: test-attacks
test-attacks: test-state $(REPORT)
	@scripts/deps test
	@$(GO_TEST) -json -count 1 $(TEST_FLAGS) -run '^TestAttack' $$(grep -rl --include='*_test.go' --exclude-dir=.cache '^func TestAttack' . | xargs -n 1 dirname | sort -u) | $(REPORT)

# test-jail tries all system calls and some 160 escapes in a confined process, as root and as a user. The last line has the figures.
.PHONY: test-jail
test-jail: check-go
	@$(GO_TEST) -c -o bin/confine.test ./sandbox/jail/confine
	@cd sandbox/jail/confine && $(CURDIR)/bin/confine.test -test.v=false

# fuzz gives each fuzz target 200,000 executions, and fails if one finds something: an hour or two, for a run every night. Some of them:
# make fuzz FUZZ='-n 20000 ./devices'.
FUZZ ?=
.PHONY: fuzz
fuzz: check-go
	@scripts/fuzz $(FUZZ)

# test-hard runs the tests that have guests on a KVM of the hardware kind, emulated if
# need be.
.PHONY: test-hard
test-hard: test-state $(REPORT)
	@scripts/deps test hard
	@$(GO_BUILD) -o bin/hwkvm ./internal/test/hwkvm/cmd/hwkvm
	@bin/hwkvm --prepare
	@echo "== tests on KVM of the hardware kind" >&2
	@$(GO_TEST) -json -p 1 -count 1 $(HARD_FLAGS) $(HARD_RUN) -exec "$(CURDIR)/bin/hwkvm --" $(HARD_PKGS) | $(REPORT) -allow '$(MAY_SKIP)'

# test-hostile has a guest attack every device, on this machine's KVM and then on one of the hardware kind: two hours. The last lines have the
# figures. In RAM, or a pause waits for this machine's disk as well. Less: make test-hostile HOSTILE='-hostile-for 10m'.
HOSTILE ?= -hostile-for 1h
.PHONY: test-hostile
test-hostile: check-go
	@scripts/deps hard
	@$(GO_BUILD) -o bin/hwkvm ./internal/test/hwkvm/cmd/hwkvm
	@bin/hwkvm --prepare
	@$(GO_TEST) -count 1 ./internal/test/hwkvm
	@status=0; \
	TMPDIR=/dev/shm $(GO_TEST) -count 1 -timeout 24h -v -run '^TestAttack' ./internal/test/hostileguest -hostile-pause 50ms $(HOSTILE) || status=1; \
	$(GO_TEST) -count 1 -timeout 24h -v -run '^TestAttack' -exec "$(CURDIR)/bin/hwkvm --" ./internal/test/hostileguest $(HOSTILE) || status=1; \
	exit $$status

# test-workloads has git, pip, npm, a Go build, SQLite, a web server and a container sleep and
# wake in one guest. Where the guest's kernel is interpreted that takes most of an hour, and
# test-workloads-hard, on a KVM of the hardware kind that is emulated, far less.
.PHONY: workloads-state test-workloads test-workloads-hard
workloads-state: build kernel
	@scripts/deps image demo workloads
	@$(DROWSE) image build --from $(IMAGE_FROM) --include $(WORKLOADS_INCLUDE) --no-docs --tag $(WORKLOADS_TAG) --install-deps >&2

test-workloads: workloads-state image
	@$(GO_TEST) -tags workloads -count 1 -run under_load -v ./sandbox
	@$(GO_TEST) -tags workloads -count 1 -timeout 90m -v -run TestWorkloads ./internal/test/workloads

# The program of the container is made outside, where the processor is not emulated.
test-workloads-hard: workloads-state
	@scripts/deps hard
	@$(GO_BUILD) -o bin/hwkvm ./internal/test/hwkvm/cmd/hwkvm
	@bin/hwkvm --prepare
	@$(GO_BUILD) -ldflags '-s -w' -o bin/workloads-app ./internal/test/workloads/testdata/app/main.go
	@DROWSE_WORKLOADS_APP=$(CURDIR)/bin/workloads-app $(GO_TEST) -tags workloads -count 1 -timeout 90m -v -run TestWorkloads -exec "$(CURDIR)/bin/hwkvm -memory 8192 --" ./internal/test/workloads

# test-systemd has a Debian with systemd, in a machine whose processor is emulated, use contrib/systemd as docs/guides/operate.md says: half an hour.
.PHONY: test-systemd
test-systemd: test-state
	@scripts/deps image demo test hard
	@$(GO_TEST) -tags workloads -count 1 -timeout 3h -v -run TestUnits ./internal/test/systemd

# test-browser has a Chromium open the page of drowse serve, on VMs in memory and once before a guest. It is not a part of test: the browser is 130 MB to download and
# 440 MB to install.
.PHONY: test-browser
test-browser: test-state $(REPORT)
	@scripts/deps browser
	@DROWSE_TEST_PROGRAM=$(CURDIR)/bin/drowse $(GO_TEST) -json -count 1 -tags browser -timeout 20m ./sandbox/api/web/... | $(REPORT)

# test-mcp has the protocol's npm package talk to drowse mcp. It needs node, npm and their registry.
.PHONY: test-mcp
test-mcp:
	@npm install --silent --no-save --prefix .cache/mcp @modelcontextprotocol/sdk@1.32.2
	@DROWSE_TEST_NPM=$(CURDIR)/.cache/mcp go test -count 1 -run TestMCP ./cmd/drowse

# test-scale tests stores of objects, archives and hosts that share sandboxes in them, on a real S3 server behind a bad network. Hosts are
# killed KILLS times, on a directory and on the server.
VERSITYGW ?= v1.8.0
.PHONY: test-scale
test-scale: check-go
	@GOBIN=$(CURDIR)/.cache/bin go install github.com/versity/versitygw/cmd/versitygw@$(VERSITYGW)
	DROWSE_TEST_VERSITYGW=$(CURDIR)/.cache/bin/versitygw DROWSE_TEST_CLUSTER_KILLS=$(or $(KILLS),200) CGO_ENABLED=0 $(GO_TEST) -count 1 -timeout 60m -tags versitygw -v -run 'TestStore_|behind_a_network|TestCrash' ./sandbox/blob/s3 ./sandbox/archive ./sandbox/cluster

# scale-proofs runs all of it at full size, with guests: 10 million simulated steps, 500 kills on each kind of store, 200 moves under load, wakes on an
# empty host from the S3 server beside wakes where the guest has slept, and 1,000 sandboxes of a cluster. What fails does not keep the others from
# running. Hours. Less: make scale-proofs STEPS=100000 KILLS=20 MOVES=5 WAKES=3 SANDBOXES=50.
MOVES ?= 200
WAKES ?= 30
.PHONY: scale-proofs
scale-proofs: test-state
	@status=0; \
	$(MAKE) scale-sim || status=1; \
	$(MAKE) test-scale KILLS=$(or $(KILLS),500) || status=1; \
	DROWSE_TEST_MOVES=$(MOVES) $(GO_TEST) -count 1 -timeout 5h -v -run TestGuest_moves ./sandbox/cluster || status=1; \
	DROWSE_TEST_WAKES=$(WAKES) DROWSE_TEST_VERSITYGW=$(CURDIR)/.cache/bin/versitygw $(GO_TEST) -count 1 -timeout 5h -tags versitygw,workloads -v -run 'TestWake_of_a_guest|TestGuest_(reads|whose|runs|stands)' ./sandbox/cluster || status=1; \
	$(MAKE) test-kubernetes || status=1; \
	exit $$status

# test-kubernetes tests the controller on a real API server and its database, built from their modules: ten minutes the first time. The rest of a
# cluster is the test's, and VMs are in memory. Sandboxes of the test with many: make test-kubernetes SANDBOXES=100. With a guest as well: GUEST=1.
.PHONY: test-kubernetes
.cache/bin/etcd .cache/bin/kube-apiserver: .cache/bin/%: kubernetes/controlplane/%/go.mod kubernetes/controlplane/%/main.go
	cd kubernetes/controlplane/$* && $(GO_BUILD) -ldflags '-s -w' -o $(CURDIR)/$@ .

test-kubernetes: check-go .cache/bin/etcd .cache/bin/kube-apiserver $(if $(GUEST),test-state)
	cd kubernetes && CGO_ENABLED=0 go vet -tags kubernetes ./... && $(if $(GUEST),DROWSE_TEST_PROGRAM=$(CURDIR)/bin/drowse )KUBEBUILDER_ASSETS=$(CURDIR)/.cache/bin DROWSE_TEST_SANDBOXES=$(or $(SANDBOXES),1000) \
		$(GO_TEST) -count 1 -timeout 60m -tags kubernetes -v ./...

# test-acme has the gateway get and renew certificates from an ACME server, Let's Encrypt's for tests: some two minutes.
PEBBLE ?= v2.10.3
.PHONY: test-acme
test-acme: check-go
	@GOBIN=$(CURDIR)/.cache/bin go install github.com/letsencrypt/pebble/v2/cmd/pebble@$(PEBBLE)
	@DROWSE_TEST_PEBBLE=$(CURDIR)/.cache/bin/pebble $(GO_TEST) -count 1 -timeout 10m -tags pebble -v -run TestACME ./sandbox/gateway

# test-api sends the HTTP API requests made from its document: `make test-api REQUESTS=100000 SEED=7`.
REQUESTS ?= 20000
SEED ?= 1
.PHONY: test-api
test-api: check-go
	cd sandbox/api && $(GO_TEST) -v -count 1 -timeout 60m -run 'TestOpenAPI|TestRights' . -args -requests $(REQUESTS) -seed $(SEED)

# test-sdk tests the clients of the HTTP API in Python and TypeScript against a server of it, whose guests are in memory. `go test ./sdk/sdktest
# -run Types -update` makes their types from the API's document.
.PHONY: test-sdk
test-sdk: check-go
	@set --; \
	if python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then set -- "$$@" Python; else echo "Python is skipped: there is no python3 of 3.11 or later" >&2; fi; \
	if ! command -v node >/dev/null || ! command -v npm >/dev/null || (($$(node -p 'process.versions.node.split(".")[0]') < 20)); then \
		echo "TypeScript is skipped: there is no Node of 20 or later with npm" >&2; \
	elif ! npm --prefix sdk/typescript ci --ignore-scripts --no-audit --no-fund >&2; then \
		echo "TypeScript is skipped: its packages cannot be had" >&2; \
	else (cd sdk/typescript && npx tsc -p src && npx tsc -p node && npx tsc -p test); set -- "$$@" TypeScript; fi; \
	$(GO_TEST) -count 1 -timeout 10m -tags sdk -v -run "Types|$$(IFS='|'; echo "$$*")" ./sdk/sdktest

# test-e2b has three versions of the unmodified npm package e2b use a server of their wire, whose guests are agents in namespaces: it needs root,
# and a Node of 20 or later with npm. The last lines are passed, failed and skipped cases by group. Some: make test-e2b E2B_ONLY=files.
# Its code interpreter is skipped without Debian's ipykernel: scripts/deps interpreter.
.PHONY: test-e2b
test-e2b: check-go
	@if ! command -v node >/dev/null || ! command -v npm >/dev/null || (($$(node -p 'process.versions.node.split(".")[0]') < 20)); then \
		echo "test-e2b is skipped: there is no Node of 20 or later with npm" >&2; exit 0; \
	fi; \
	if ! npm --prefix sandbox/e2b/e2btest/node ci --ignore-scripts --no-audit --no-fund >&2; then \
		echo "test-e2b is skipped: its packages cannot be had" >&2; exit 0; \
	fi; \
	cd sandbox/e2b/e2btest; E2B_ONLY='$(E2B_ONLY)' $(GO_TEST) -count 1 -parallel 3 -timeout 10m -tags e2bnode -run TestNode

# e2b-for has a command use such a server, as a test suite of others would: make e2b-for E2B_COMMAND='cd suite && npx vitest run'. The command finds it
# by host names and TLS, or sets E2B_SANDBOX_URL=$E2B_API_URL. Guests have this machine's files, and no network.
.PHONY: e2b-for
e2b-for: check-go
	@cd sandbox/e2b/e2btest && $(GO_TEST) -count 1 -timeout 10h -tags e2bnode -run TestServer_stands

# test-recipes runs sandbox/e2b/e2btest/recipes: agent stacks that use the package e2b, with a model of its own.
.PHONY: test-recipes
test-recipes: check-go
	@if ! npm --prefix sandbox/e2b/e2btest/recipes ci --ignore-scripts --no-audit --no-fund >&2; then \
		echo "test-recipes is skipped: its packages cannot be had" >&2; exit 0; \
	fi; \
	cd sandbox/e2b/e2btest && $(GO_TEST) -count 1 -timeout 5m -v -tags e2bnode -run TestRecipes

# agent-proofs shows what takes too long for each run of the tests: copies of 1 GiB that are cut and resumed, a
# command that prints as much, and a copy into a guest that a sleep cuts. It takes some minutes.
.PHONY: agent-proofs
agent-proofs: test-state
	@$(GO_TEST) -count 1 -v -run TestBulk ./guest -bulk-mib 1024
	@$(GO_TEST) -count 1 -v -run 'TestWith_clones_of_one_snapshot/(forwards|a_copy)' ./sandbox -agent-copies

# agent-proofs-hard shows it with a real guest, on a KVM of the hardware kind that is emulated if need be: copies of 1 GiB into it and out of it,
# 100 commands at once, one that prints 1 GiB, and one that floods and stalls all streams. Half an hour. Less: make agent-proofs-hard BULK='-bulk-mib 64'.
BULK ?= -bulk-mib 1024
.PHONY: agent-proofs-hard
agent-proofs-hard: test-state
	@scripts/deps hard
	@$(GO_BUILD) -o bin/hwkvm ./internal/test/hwkvm/cmd/hwkvm
	@bin/hwkvm --prepare
	@$(GO_TEST) -tags workloads -count 1 -timeout 3h -v -run TestAgent_of_a_guest -exec "$(CURDIR)/bin/hwkvm -memory 4096 --" ./internal/test/workloads $(BULK)

# front-proofs shows what takes too long for each run of the tests: 10,000 WebSockets through one gateway, 1,000 streams of the API, and 1 GiB from a
# pipe and from a terminal through sleeps and cuts. Their figures are printed, and one that fails does not keep the others from running. It takes some
# ten minutes and, for the WebSockets, 61,000 descriptors. Less: make front-proofs WEBSOCKETS=300 STREAMS=50 HELD_MIB=32.
WEBSOCKETS ?= 10000
STREAMS ?= 1000
HELD_MIB ?= 1024
.PHONY: front-proofs
front-proofs: check-go
	@status=0; \
	(cd sandbox/gateway && $(GO_TEST) -count 1 -timeout 30m -v -run many_WebSockets . -websockets $(WEBSOCKETS)) || status=1; \
	(cd sandbox/api && $(GO_TEST) -count 1 -timeout 30m -v -run 'many_streams' . -streams $(STREAMS)) || status=1; \
	(cd sandbox/api && $(GO_TEST) -count 1 -timeout 30m -v -run 'held_output' . -held-mib $(HELD_MIB)) || status=1; \
	exit $$status

# life-proofs has one busy guest sleep 200 times, and then clients work on 200 of 1,000 sandboxes for ten minutes, and then has 300 of the processes killed that take part: half an hour
# and more, on a machine with nothing else to do. Fewer: make life-proofs LIFE='-life-asleep 24 -life-recorded 100'.
# Where the machine may stand still for minutes: add -life-patience 25m. Of a run that fails the logs are kept, and it says where.
LIFE ?= -life-for 10m -life-asleep 200 -life-recorded 1000 -life-kills 300
.PHONY: life-proofs
life-proofs: test-state
	@$(GO_TEST) -count 1 -timeout 2h -v -run TestMany_sleeps ./sandbox -cycles 200
	@$(GO_TEST) -tags workloads -count 1 -timeout 3h -v -run TestLife_of_many_sandboxes ./sandbox $(LIFE)

# jail-proofs has 10,000 confined sandboxes come and go, and counts what they leave on their host; compares what 1,000 clones of one guest say; and has
# a guest sleep for 30 days. jail-floods has one guest flood its host, and times its neighbour. All on a KVM of the hardware kind, a machine of its own
# that is emulated if need be: a day there. Less: make jail-proofs JAIL='-cycles 100 -clones 100'; make jail-floods FLOODS='-flood-kinds disk'.
JAIL ?= -cycles 10000 -clones 1000 -days 30
FLOODS ?= -flood-rounds 20 -flood-execs 20
.PHONY: jail-proofs jail-floods
jail-proofs jail-floods: test-state
	@scripts/deps hard
	@$(GO_BUILD) -o bin/hwkvm ./internal/test/hwkvm/cmd/hwkvm
	@bin/hwkvm --prepare
	@DROWSE_TEST_PROGRAM=$(CURDIR)/bin/drowse $(GO_TEST) -tags workloads -count 1 -timeout 48h -v -exec "$(CURDIR)/bin/hwkvm --" \
		./internal/test/jailproofs $(if $(filter jail-floods,$@),-run TestFloods $(FLOODS),-run 'TestCycles|TestClones|TestDays' $(JAIL))

# create-proofs has 8 clients create 200 sandboxes of one template, and compares what they say that they are: some minutes. Less: CREATES='-creates 20'.
CREATES ?= -creates 200 -clients 8
.PHONY: create-proofs
create-proofs: test-state
	@$(GO_TEST) -tags workloads -count 1 -timeout 3h -v -run TestCreates ./internal/test/jailproofs $(CREATES)

# example runs the program in examples/embed.
.PHONY: example
example: test-state
	@go run ./examples/embed $(STATE) $(CURDIR)/bin/drowse

# agentlife runs the program in examples/agentlife and prints what it does: some ten minutes where the guest's kernel is interpreted. SLACK is how long after its 15 s without use the workspace may take until
# it is asleep: more on a busy machine.
AGENTLIFE_INCLUDE ?= git,python3
AGENTLIFE_TAG ?= drowse-agentlife
SLACK ?= 3s
.PHONY: agentlife
agentlife: build kernel
	@scripts/deps image demo workloads
	@$(DROWSE) image build --from $(IMAGE_FROM) --include $(AGENTLIFE_INCLUDE) --no-docs --tag $(AGENTLIFE_TAG) --install-deps >&2
	@go run ./examples/agentlife -state $(STATE) -drowse $(CURDIR)/bin/drowse -image $(AGENTLIFE_TAG) -slack $(SLACK)

.PHONY: $(REPORT)
$(REPORT): check-go
	@$(GO_BUILD) -o $@ ./internal/testreport

.PHONY: lint
lint: check-go
	@test -z "$$(gofmt -l $$(git ls-files '*.go'))" || { echo "not formatted, run make fmt:" >&2; gofmt -l $$(git ls-files '*.go') >&2; exit 1; }
	go run $(GOLANGCI) run ./...
	cd kubernetes && go run $(GOLANGCI) run --build-tags kubernetes ./...

# loc prints the lines of code, comments and tests of each package.
.PHONY: loc
loc: check-go
	@go run ./internal/loc

.PHONY: fmt
fmt:
	gofmt -w $$(git ls-files '*.go')

# generate needs protoc, of Debian's package protobuf-compiler, and for the eBPF programs
# what scripts/deps bpf installs on bookworm.
.PHONY: generate
generate: check-go
	go generate ./...

.PHONY: install
install: build
	install -D -m 755 bin/drowse $(DESTDIR)$(PREFIX)/bin/drowse
	install -D -m 755 bin/drowse-vmm $(DESTDIR)$(PREFIX)/bin/drowse-vmm
	install -D -m 755 bin/drowse-agent $(DESTDIR)$(PREFIX)/bin/drowse-agent

# clean leaves the kernels and images that have been built; distclean does not.
.PHONY: clean distclean
clean:
	rm -rf bin

distclean: clean
	rm -rf .cache
