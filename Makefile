# The commands a developer types; each is a script or a cargo call one can also run alone.
PREFIX ?= /usr/local
SBINDIR ?= /sbin
SECONDS_EACH ?= 10
MINUTES ?= 60
WAN ?= --out '$(CURDIR)/docs/results'

.PHONY: help demo test soak test-upgrade posix lint build install bench bench-andrew bench-nfs bench-pool bench-wan bench-wan-andrew fuzz pool

help:
	@echo 'make demo     five nodes, a real tree, a mount, two crashes: see it work'
	@echo 'make test     all tests (what .ci/run calls)'
	@echo 'make soak     the tests of the simulator with other seeds, for MINUTES=60'
	@echo 'make test-upgrade  a ring of five goes from one build to another; OLD=, NEW= are commits'
	@echo 'make posix    pjdfstest, fsx, real programs (and xfstests: XFSTESTS=its directory) on TFS and'
	@echo '              on a volume beside the kernel'"'"'s ext2 and ext4, and over NFS beside nfs-ganesha, as root;'
	@echo '              says what it skips'
	@echo 'make pool     a pool of five nodes whose primaries are killed under real programs, as root;'
	@echo '              SUITES='"'"'homes stalls'"'"' runs these of scripts/test-pool alone'
	@echo 'make lint     formatting, clippy, crate arrows'
	@echo 'make build    target/release/atoll'
	@echo 'make install  the command, man pages and completions below PREFIX=$(PREFIX); as root'
	@echo '              also mount(8)'"'"'s helper in SBINDIR=$(SBINDIR)'
	@echo 'make bench    the figures in docs/results/ring.md, volume.md and andrew.md'
	@echo '              AGAINST=atoll-of-before prints ratios to another build'
	@echo 'make bench-andrew  those of file systems alone (andrew.md), as root'
	@echo 'make bench-nfs  atoll nfs beside nfs-ganesha (nfs.md), as root; ROUNDS=5'
	@echo 'make bench-pool  pools beside ext4, GlusterFS, MooseFS and plain NFS (pool-bench.md), as root; ROUNDS=3'
	@echo '              PARTS='"'"'rows table1 table2'"'"' runs these of scripts/bench-pool alone'
	@echo 'make bench-wan  downloads between network namespaces beside TCP, as root; WAN=--quick'
	@echo 'make bench-wan-andrew  the Andrew benchmark on a shared volume between namespaces, beside the'
	@echo '              simulator, as root; WAN=--quick'
	@echo 'make fuzz     every decoder of foreign bytes, SECONDS_EACH=$(SECONDS_EACH)'

demo:
	@scripts/demo

test:
	@scripts/test

soak:
	@MINUTES=$(MINUTES) scripts/soak

test-upgrade:
	@scripts/test-upgrade $(OLD) $(NEW)

posix:
	@scripts/test-posix

pool:
	@scripts/test-pool $(SUITES)

lint:
	@scripts/lint

build:
	cargo build --release --locked -p atoll-cli

install: build
	DESTDIR='$(DESTDIR)' SBINDIR='$(SBINDIR)' scripts/install '$(PREFIX)'

bench: bench-andrew
	cargo bench --locked -p atoll-cli --bench volume
	cargo bench --locked -p atoll-cli --bench ring$(if $(AGAINST), -- --against '$(abspath $(AGAINST))')

bench-andrew:
	@scripts/bench-andrew $(ANDREW)

bench-nfs:
	@scripts/bench-nfs $(ROUNDS)

bench-pool:
	@ROUNDS=$(or $(ROUNDS),3) scripts/bench-pool $(PARTS)

bench-wan: build
	cargo run --release --locked -p atoll-bench -- $(WAN)

bench-wan-andrew: build
	cargo run --release --locked -p atoll-bench -- andrew $(WAN)

fuzz:
	cargo run --release --locked -p atoll-fuzz -- --seconds $(SECONDS_EACH)
