# `make demo` and `make test` do all the set-up they need.
#   PYTHON  interpreter the virtual environment is made with (3.11 or 3.12)
#   TORCH   cpu (default) or cuda; with cuda, pip's own default build of torch is taken
PYTHON ?= python3
TORCH  ?= cpu
VENV   ?= .venv
RUN    ?= runs/latest
PY     := $(VENV)/bin/python
STAMP  := $(VENV)/.ready-$(TORCH)
SGLANG_VENV ?= .venv-sglang
HARNESS     := tests/engines/sglang_cpu
SGLANG_STAMP := $(SGLANG_VENV)/.ready

export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: setup demo test lint types eval-accept bench clean sglang-cpu test-engines

setup: $(STAMP)

$(STAMP): pyproject.toml requirements/lock.txt scripts/setup.sh
	PYTHON=$(PYTHON) TORCH=$(TORCH) VENV=$(VENV) bash scripts/setup.sh
	touch $@

demo: setup
	$(PY) train/run.py conf=smollm2
	$(PY) train/run.py conf=smollm2_control
	$(PY) -m eval.compare runs/smollm2 runs/smollm2_control --out runs/demo

# One thread a process: two test processes with two threads each would spend their time waiting for one another.
test: setup
	OMP_NUM_THREADS=1 $(PY) -m pytest tests -n 2 --dist loadfile

# The real SGLang on a CPU, in a virtual environment of its own, for tests and small demonstrations.
sglang-cpu: $(SGLANG_STAMP)

$(SGLANG_STAMP): $(HARNESS)/requirements.txt $(HARNESS)/setup.sh
	PYTHON=$(PYTHON) SGLANG_VENV=$(SGLANG_VENV) bash $(HARNESS)/setup.sh
	touch $@

# The tests that run the real engines, alone.
test-engines: setup sglang-cpu
	OMP_NUM_THREADS=1 $(PY) -m pytest tests/engines -n 2 --dist loadfile

lint: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: setup
	$(PY) -m mypy

eval-accept: setup
	@test -e $(RUN)/config.yaml || { echo "error: no run at $(RUN). To mend: run make demo, or give RUN=runs/<name>" >&2; exit 2; }
	$(PY) train/run.py --config-path $(abspath $(RUN)) --config-name config 'stages=[eval]' $(ARGS)

bench: setup
	$(PY) -m benchmarks.step
	$(PY) -m benchmarks.extract

clean:
	rm -rf $(VENV) $(SGLANG_VENV) runs targets .cache
