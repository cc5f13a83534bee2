# make compile-llm   compile a model into build/NAME and let it answer a question
# make test          run the quick tests: the core, in about 8 minutes on 2 cores
# make test-all      run all tests but those of real checkpoints
# make test-family   run every test of one model family: make test-family FAMILY=gemma (docs/porting.md)
# make test-models   check real checkpoints against transformers: 3 GB to fetch once (0.5, 1.1 and 1.2 GB of
#                    models, 160 MB of others), 4 GB in the cache, 10 GB of memory, about 20 minutes
# make coverage      run all tests, and print how much of each package they run
# make test-vulkan   run bundles for GPUs on Mesa's llvmpipe, which it fetches unless installed: 60 MB
# make test-aarch64  run bundles for aarch64 on aarch64 CPUs that qemu emulates: 15 minutes, 200 MB
# make lint          ruff, mypy, import-linter and .ci/language.py, as CI runs them
# make mutants       put small faults into castiron, one at a time: a test has to notice each
# make bench         measure against llama.cpp and HF transformers, write JSON
# make docs          the pages of docs as a site with search, in build/site
# make clean         remove what was built; make distclean removes .venv too
#
# The first target that is made sets up .venv with exact versions: requirements.lock for compile-llm
# (640 MB on disk), requirements-test.lock on top for test, lint and mutants (1.1 GB more, torch above
# all) and requirements-test-all.lock for test-all and coverage (1.5 GB more, Ray and JAX above all).

# A name from the catalogue, a GGUF file, or a directory of safetensors.
MODEL ?= smollm2-135m-instruct
# Positions of the KV cache; empty means the default of castiron compile.
CONTEXT ?=
WEIGHTS ?= native
PROMPT ?= Why is the sky blue? Answer in three sentences.
# Token ids instead of PROMPT, for a model without a tokenizer: TOKENS=1,2,3
TOKENS ?=
THREADS ?= 2
PYTHON ?= python3
# Arguments for pytest: make test PYTEST_ARGS='-k kernels'
PYTEST_ARGS ?=
# Processes that run tests at the same time; a file's tests run in one of them.
JOBS ?= 2
# Model type whose tests make test-family runs.
FAMILY ?= llama
# Words in names or files of mutants; empty means all: make mutants MUTANTS='window grammar'
MUTANTS ?=

BIN := .venv/bin
key = $(shell cat $(1) pyproject.toml | cksum | cut -d ' ' -f 1)
LOCK := requirements.lock
TEST_LOCK := requirements-test.lock
ALL_LOCK := requirements-test-all.lock
INSTALLED := .venv/installed-$(call key,$(LOCK))
TEST_INSTALLED := .venv/installed-test-$(call key,$(LOCK) $(TEST_LOCK))
ALL_INSTALLED := .venv/installed-all-$(call key,$(LOCK) $(TEST_LOCK) $(ALL_LOCK))
BENCH_INSTALLED := .venv/installed-bench-$(call key,$(LOCK) $(TEST_LOCK) requirements-bench.lock)
DOCS_INSTALLED := .venv/installed-docs-$(call key,requirements-docs.lock)
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check --no-input

# The shell sees user text through the environment, so that quotes in it need no care.
export MODEL CONTEXT WEIGHTS PROMPT TOKENS FAMILY MUTANTS
# build/NAME, where castiron compile puts the bundle: the model's last path component without .gguf.
OUT = name="$${MODEL%/}"; name="$${name\#\#*/}"; out="build/$${name%.gguf}"

.PHONY: compile-llm test test-all test-family test-models test-vulkan test-aarch64 coverage lint mutants bench docs clean distclean
.DEFAULT_GOAL := compile-llm

compile-llm: $(INSTALLED)
	@$(OUT); set -e; \
	$(BIN)/castiron compile "$$MODEL" -o "$$out" --weights "$$WEIGHTS" $${CONTEXT:+--context "$$CONTEXT"}; \
	if [ -n "$$TOKENS" ]; then $(BIN)/castiron run "$$out" --tokens "$$TOKENS" -n 32; \
	else printf '\n> %s\n\n' "$$PROMPT"; $(BIN)/castiron run "$$out" -p "$$PROMPT" </dev/null; fi

PYTEST = -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0 $(PYTEST_ARGS)

test: $(TEST_INSTALLED)
	@$(BIN)/python $(PYTEST) --tier quick

# Exports the variables with which the Vulkan loader finds llvmpipe, or nothing if this system cannot get it.
LLVMPIPE = eval "$$($(BIN)/python -m tests.mesa build/mesa)" &&

# CI, which has run the quick tests, adds PYTEST_ARGS='--tier full'.
test-all: $(ALL_INSTALLED)
	@$(LLVMPIPE) $(BIN)/python $(PYTEST)

test-vulkan: $(TEST_INSTALLED)
	@$(LLVMPIPE) CASTIRON_VULKAN=all $(BIN)/python $(PYTEST) tests/vulkan tests/compile/test_gpu_targets.py tests/compile/test_gpu_dispatches.py

# Of both tiers, because most shapes of a family's tiny models are in the full one.
test-family: $(TEST_INSTALLED)
	@$(BIN)/python $(PYTEST) -k "$$FAMILY" tests/emitter/test_models*.py tests/emitter/test_config.py

# One process, because the largest reference takes 7 GB.
test-models: $(TEST_INSTALLED)
	@$(BIN)/python -m pytest -v -o tmp_path_retention_policy=none $(PYTEST_ARGS) --tier models tests/models

test-aarch64: $(TEST_INSTALLED)
	@$(BIN)/python -m tests.aarch64 build/aarch64
	@CASTIRON_AARCH64=build/aarch64 $(BIN)/python -m pytest $(PYTEST_ARGS) tests/test_aarch64.py

# A line a package: the share of its lines that ran.
coverage: $(ALL_INSTALLED)
	@rm -rf build/coverage; mkdir -p build/coverage
	@$(BIN)/python -m coverage run $(PYTEST); status=$$?; \
	$(BIN)/python -m coverage combine --quiet; \
	for package in emitter vmfb pipelines reference; do \
		printf '%-9s %s %%\n' $$package $$($(BIN)/python -m coverage report --include="$$package/*" --format=total --precision=1); \
	done; \
	exit $$status

lint: $(TEST_INSTALLED)
	@$(BIN)/python -m ruff check
	@$(BIN)/python -m ruff format --check --quiet
	@$(BIN)/python -m mypy
	@$(BIN)/lint-imports --no-cache --no-logo
	@$(BIN)/python .ci/language.py

mutants: $(ALL_INSTALLED)
	@$(BIN)/python -m tests.mutants $$MUTANTS

bench: $(BENCH_INSTALLED)
	@$(OUT); set -e; \
	$(BIN)/castiron compile "$$MODEL" -o "$$out" --weights "$$WEIGHTS" $${CONTEXT:+--context "$$CONTEXT"}; \
	$(BIN)/castiron bench "$$out" --threads $(THREADS) --against llama.cpp,hf \
		--output build/bench.json

docs: $(DOCS_INSTALLED)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet --config-file .ci/mkdocs.yml
	@echo 'build/site/index.html'

$(INSTALLED): | $(BIN)/python
	@echo 'castiron: installing what compiles, runs and serves into .venv, once: 135 MB to fetch, 640 MB on disk' >&2
	@$(PIP) install -r $(LOCK)
	@$(PIP) install --no-deps --no-build-isolation --editable .
	@rm -f .venv/installed-*
	@touch $@

$(TEST_INSTALLED): $(INSTALLED)
	@echo 'castiron: installing what the quick tests need, once: 1.1 GB on disk, torch above all' >&2
	@$(PIP) install "$$(grep '^torch==' $(TEST_LOCK))"
	@echo 'castiron:   everything else' >&2
	@$(PIP) install -r $(TEST_LOCK)
	@touch $@

$(ALL_INSTALLED): $(TEST_INSTALLED)
	@echo 'castiron: installing what the other tests need, once: 1.5 GB on disk, Ray and JAX above all' >&2
	@$(PIP) install -r $(ALL_LOCK)
	@touch $@

$(BENCH_INSTALLED): $(TEST_INSTALLED)
	@echo 'castiron: building llama.cpp for the bench, about five minutes, once' >&2
	@$(PIP) install -r requirements-bench.lock
	@touch $@

$(DOCS_INSTALLED): | $(BIN)/python
	@echo 'castiron: installing mkdocs-material into .venv, once: 130 MB on disk' >&2
	@$(PIP) install -r requirements-docs.lock
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo 'castiron: $(PYTHON) is older than Python 3.11; name a newer one with PYTHON=' >&2; exit 1; }
	@echo 'castiron: making .venv' >&2
	@$(PYTHON) -m venv .venv

clean:
	rm -rf build .wheel *.egg-info .pytest_cache .hypothesis
	find emitter pipelines vmfb reference tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf .venv
