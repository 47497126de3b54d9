# SPDX-License-Identifier: Apache-2.0
# Each target that needs .venv runs tools/setup.sh first. The script creates .venv,
# or does nothing if an up-to-date .venv exists.

PYTHON_ENV := .venv/bin/python
PROPERTY_OPERATIONS ?= 1000000
TEST_WORKERS ?= 2
# Recorded responses for some benchmarks: a folder of JSONL files.
TRACES ?=

# With PYTHONDONTWRITEBYTECODE set, Python would keep no .pyc files in .venv, and every server
# would take twice as long to start.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup with-traces demo test test-quick test-all test-long test-sanitized test-versions sglang-diff release bench-filter bench-serve bench-kernels bench-gpu bench-policies bench-reasoncache bench-memshare bench-siblings bench-short bench-answers bench-fidelity bench-documents bench-agents small-model real-model soak docs lint format constraints clean
.DEFAULT_GOAL := help

help:
	@echo "make demo         compare stock SGLang, plain and tuned, with reasoncache on the embedded model (no GPU); see it in a browser"
	@echo "make test         quick test suite, real servers included (no GPU)"
	@echo "make test-all     the same with every kind of server"
	@echo "make test-quick   unit tests alone, without a server (some 4 minutes of CPU time on 2 processes)"
	@echo "make test-long    property test with PROPERTY_OPERATIONS=$(PROPERTY_OPERATIONS) operations"
	@echo "make test-sanitized  native code under AddressSanitizer, UBSan and ThreadSanitizer"
	@echo "make test-versions  contract tests and a live server with each supported SGLang version"
	@echo "make sglang-diff OLD=0.5.22 NEW=0.5.23  what changed of SGLang's functions that we use; DIFF_ARGS=--full: how"
	@echo "make release      sdist and wheel in dist/, checked, nothing uploaded"
	@echo "make bench-filter TRACES=FOLDER    what the filter costs"
	@echo "make bench-serve TRACES=FOLDER     stock against ours: throughput, memory, answers (two hours)"
	@echo "make bench-kernels  paged attention against SGLang's torch-native backend, on a GPU against FlashInfer"
	@echo "make bench-gpu TRACES=FOLDER       recorded responses on one GPU, stock and ours in turns (half an hour; tools/gpu.sh checks)"
	@echo "make bench-policies  cache policies at equal saving: accuracy (an hour)"
	@echo "make bench-reasoncache  ablations of the ReasonCache paper: accuracy, slots saved, throughput (two hours)"
	@echo "make bench-memshare  ablations of the MemShare paper, the same (two hours)"
	@echo "make bench-siblings  1, 4 and 16 samples of each prompt: stock, sharing within responses and across (hours)"
	@echo "make bench-short  stock, tuned stock, sharing at once and when short, from ample memory to two requests (two hours)"
	@echo "make bench-answers  a fine-tuned language model: accuracy under sharing, random sharing and evicting (hours)"
	@echo "make bench-fidelity TRACES=FOLDER  what sharing costs a real language model on recorded responses (hours)"
	@echo "make bench-documents  prompts made of cached documents: answers of SmolLM2, time to the first token (hours)"
	@echo "make bench-agents  conversations that keep the reasoning: what is cached for the next turn (half an hour)"
	@echo "make soak         an hour of load that swings, under SGLang's strict memory checks"
	@echo "make small-model  SmolLM2-135M-Instruct and the small reasoner as Hugging Face folders in build/models"
	@echo "make real-model   the same, Qwen2.5-Coder-Instruct 0.5B and 1.5B, and all-MiniLM-L6-v2: fetches 1.6 GB, makes 5 GB"
	@echo "make docs         the documents as a site in build/site, links checked"
	@echo "make lint         ruff and mypy"
	@echo "make format       ruff format and import order"
	@echo "make constraints  renew constraints.txt with the newest versions that resolve"
	@echo "make clean        remove .venv, .tools and caches"

setup:
	@tools/setup.sh

demo: setup
	$(PYTHON_ENV) -m eval.demo $(DEMO_ARGS)

# Tests use one OpenMP thread: for small tensor operations, waking more threads costs more time than they save.
# Each of the TEST_WORKERS pytest processes keeps up to two servers running, each with up to 3 GB of memory.
PYTEST := OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(PYTHON_ENV) -m pytest
IN_PARALLEL := -n $(TEST_WORKERS) --dist loadgroup --no-loadscope-reorder

test: setup
	$(PYTEST) $(IN_PARALLEL) -m "not long" $(TEST_ARGS)

# Attention and failures are tested at length, so they are left to make test.
QUICK := tests/unit tests/contract tests/eviction tests/test_flags.py
QUICK += --ignore-glob="*/test_attention*" --ignore=tests/unit/test_containment.py
test-quick: setup
	$(PYTEST) $(IN_PARALLEL) -m "not slow" $(QUICK) $(TEST_ARGS)

test-all: setup
	$(PYTEST) $(IN_PARALLEL) $(TEST_ARGS)

test-long: setup
	REASONCACHE_PROPERTY_OPERATIONS=$(PROPERTY_OPERATIONS) $(PYTHON_ENV) -m pytest -m property $(TEST_ARGS)

test-sanitized: setup
	tools/sanitize.sh $(PYTHON_ENV) $(TEST_ARGS)

test-versions: setup
	tools/versions.sh $(PYTHON_ENV)

sglang-diff: setup
	@tools/sglang_diff.sh $(PYTHON_ENV) $(OLD) $(NEW) $(DIFF_ARGS)

release:
	@tools/release.sh

with-traces:
	@test -n "$(TRACES)" || { echo "TRACES=FOLDER must name a folder of recorded responses (*.jsonl), got none" >&2; exit 2; }

bench-filter: with-traces setup
	$(PYTHON_ENV) -m eval.bench.filter $(TRACES) $(BENCH_ARGS)

bench-serve: with-traces setup
	$(PYTHON_ENV) -m eval.bench.servers serve --traces $(TRACES) $(BENCH_ARGS)

bench-kernels: setup
	$(PYTHON_ENV) -m eval.bench.attention $(BENCH_ARGS)

bench-gpu: with-traces setup
	$(PYTHON_ENV) -m eval.bench.servers gpu --traces $(TRACES) $(BENCH_ARGS)

bench-policies: setup
	$(PYTHON_ENV) -m eval.bench.servers policies $(BENCH_ARGS)

bench-reasoncache: setup
	$(PYTHON_ENV) -m eval.bench.servers reasoncache $(BENCH_ARGS)

bench-memshare: setup
	$(PYTHON_ENV) -m eval.bench.servers memshare $(BENCH_ARGS)

bench-siblings: small-model
	$(PYTHON_ENV) -m eval.bench.servers siblings $(if $(TRACES),--traces $(TRACES)) $(BENCH_ARGS)

bench-short: small-model
	$(PYTHON_ENV) -m eval.bench.servers short $(BENCH_ARGS)

small-model: setup
	$(PYTHON_ENV) -m eval.models.smollm2 build/models/smollm2
	$(PYTHON_ENV) -m eval.small_reasoner

real-model: small-model
	$(PYTHON_ENV) -m eval.models.qwen 0.5b build/models/qwen-0.5b
	$(PYTHON_ENV) -m eval.models.qwen 1.5b build/models/qwen-1.5b
	$(PYTHON_ENV) -m eval.models.minilm build/models/minilm

bench-answers: small-model
	$(PYTHON_ENV) -m eval.bench.servers answers $(BENCH_ARGS)

bench-fidelity: with-traces small-model
	$(PYTHON_ENV) -m eval.fidelity build/models/smollm2 $(TRACES) --limit 20 $(BENCH_ARGS)

bench-agents: setup
	$(PYTHON_ENV) -m eval.bench.agents $(BENCH_ARGS)

bench-documents: small-model
	$(PYTHON_ENV) -m eval.bench.documents $(BENCH_ARGS)

soak: setup
	$(PYTHON_ENV) -m eval.soak $(SOAK_ARGS)

docs: setup
	NO_MKDOCS_2_WARNING=1 $(PYTHON_ENV) -m mkdocs build --strict

lint: setup
	$(PYTHON_ENV) -m ruff check .
	$(PYTHON_ENV) -m ruff format --check .
	$(PYTHON_ENV) -m mypy sglang_reasoncache eval tests examples

format: setup
	$(PYTHON_ENV) -m ruff check --fix .
	$(PYTHON_ENV) -m ruff format .

constraints:
	@tools/setup.sh constraints

clean:
	rm -rf .venv .tools build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
