# make compile-llm   compile a model into build/NAME and let it answer a question
# make test          run the test suite
# make lint          ruff and mypy, as CI runs them
# make bench         measure against llama.cpp and HF transformers, write JSON and a chart
# make clean         remove what was built; make distclean removes .venv too
#
# The first target that is made sets up .venv with the exact versions of requirements.lock.

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

BIN := .venv/bin
KEY := $(shell cat requirements.lock pyproject.toml | cksum | cut -d ' ' -f 1)
BENCH_KEY := $(shell cat requirements.lock requirements-bench.lock pyproject.toml | cksum | cut -d ' ' -f 1)
INSTALLED := .venv/installed-$(KEY)
BENCH_INSTALLED := .venv/installed-bench-$(BENCH_KEY)
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check --no-input

# The shell sees user text through the environment, so that quotes in it need no care.
export MODEL CONTEXT WEIGHTS PROMPT TOKENS
# build/NAME, where castiron compile puts the bundle: the model's last path component without .gguf.
OUT = name="$${MODEL%/}"; name="$${name\#\#*/}"; out="build/$${name%.gguf}"

.PHONY: compile-llm test lint bench clean distclean
.DEFAULT_GOAL := compile-llm

compile-llm: $(INSTALLED)
	@$(OUT); set -e; \
	$(BIN)/castiron compile "$$MODEL" -o "$$out" --weights "$$WEIGHTS" $${CONTEXT:+--context "$$CONTEXT"}; \
	if [ -n "$$TOKENS" ]; then $(BIN)/castiron run "$$out" --tokens "$$TOKENS" -n 32; \
	else printf '\n> %s\n\n' "$$PROMPT"; $(BIN)/castiron run "$$out" -p "$$PROMPT" </dev/null; fi

test: $(INSTALLED)
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(INSTALLED)
	@$(BIN)/python -m ruff check
	@$(BIN)/python -m ruff format --check --quiet
	@$(BIN)/python -m mypy

bench: $(INSTALLED) $(BENCH_INSTALLED)
	@$(OUT); set -e; \
	$(BIN)/castiron compile "$$MODEL" -o "$$out" --weights "$$WEIGHTS" $${CONTEXT:+--context "$$CONTEXT"}; \
	$(BIN)/castiron bench "$$out" --threads $(THREADS) --against llama.cpp,hf \
		--output build/bench.json --chart build/bench.svg

$(INSTALLED): | $(BIN)/python
	@echo 'castiron: installing the locked packages into .venv, once' >&2
	@echo 'castiron:   torch (the reference that verify compares with)' >&2
	@$(PIP) install "$$(grep '^torch==' requirements.lock)"
	@echo 'castiron:   everything else' >&2
	@$(PIP) install -r requirements.lock
	@$(PIP) install --no-deps --no-build-isolation --editable .
	@rm -f .venv/installed-*
	@touch $@

$(BENCH_INSTALLED): $(INSTALLED)
	@echo 'castiron: building llama.cpp for the bench, about five minutes, once' >&2
	@$(PIP) install -r requirements-bench.lock
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo 'castiron: $(PYTHON) is older than Python 3.11; name a newer one with PYTHON=' >&2; exit 1; }
	@echo 'castiron: making .venv' >&2
	@$(PYTHON) -m venv .venv

clean:
	rm -rf build *.egg-info .pytest_cache .hypothesis
	find emitter pipelines vmfb reference tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf .venv
