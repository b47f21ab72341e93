# One line per command; the README explains them.
PYTHON ?= python3
VENV   ?= .venv
PORT   ?= 8080
BIN    := $(VENV)/bin
KBIN   := $(VENV)-kernels/bin
# The versions of the images' lock and of what tests need; torch has a pin of its own.
LOCKED := environment/locked.txt
PIN    := -c constraints.txt -c $(LOCKED)
# The GPU image's Triton: the kernels are tested with it too, from a folder that comes before the installed one.
IMAGE_TRITON := $(shell sed -n 's/^triton==\([0-9.]*\).*/\1/p' docker/requirements-cuda.txt)
NEW_TRITON   := $(abspath $(VENV)-kernels)/triton-$(IMAGE_TRITON)
# The stand-in for a GPU: with the torch of the lock, and with the one that ran on a GPU.
LOCKED_TORCH := $(shell sed -n 's/^torch==//p' constraints.txt)
CARD_TORCHES := $(LOCKED_TORCH) 2.11.0
CARD_FOLDER   = $(VENV)-card/torch-$(1)
CARD_RUN      = $(BIN)/python tests/fake_card/run.py $(CARD_FOLDER)

export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: run test test-all unit thorough parity differential test-nodes test-clients test-lowest test-quantizers kernels fake-card test-gpu lint docs bench bench-router \
        bench-gpu soak soak-models wheel operators stubs reference locks audit check-deploy clean

run: $(VENV)/.installed
	exec $(BIN)/launcher --model-id demo --hostname 127.0.0.1 --port $(PORT)

# Four processes, even on two cores: many tests wait. The end-to-end tests come first, what is short last.
PYTEST := $(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder

# Style and types beside the tests, since mypy uses one core only.
test: $(VENV)/.installed-test
	+$(MAKE) --no-print-directory --jobs 2 --keep-going lint unit

unit: $(VENV)/.installed-test
	$(PYTEST)

# All that runs without a card, an engine for images or a quarter of an hour of abuse; in the end the seconds of each.
# LONG_TESTS_END: a Unix time from which on no other part and no other long test begins; they are named.
test-all:
	@for part in test test-clients kernels fake-card thorough; do \
	    began=$$(date +%s); \
	    if [ $$part != test ] && [ "$${LONG_TESTS_END:-$$began}" -lt $$began ]; then took="$$took $$part left out;"; continue; fi; \
	    $(MAKE) --no-print-directory SHORT=1 $$part || exit; \
	    took="$$took $$part $$(( $$(date +%s) - began )) s;"; \
	done; echo "make test-all:$$took"

# What `make test` leaves out, its random tests again with more cases, and the site. SHORT=1 leaves out what is weekly
# and the additional cases.
thorough: $(VENV)/.installed-test docs
	$(PYTEST) $(if $(filter-out 0,$(SHORT)),-m "(parity or long) and not weekly",--thorough -m "parity or long or random or weekly")

# All tests of groups of nodes, on machines made of namespaces; needs root. `make thorough` has them too, with fewer
# starts of a group.
test-nodes: $(VENV)/.installed-test
	NODE_RESTARTS=20 $(BIN)/python -m pytest -m "long or not long" tests/e2e/test_node_groups.py tests/e2e/test_ray_placement.py \
		tests/unit/launcher/nodes

# The model families that `make test` leaves out.
parity: $(VENV)/.installed-test
	$(BIN)/python -m pytest -m parity

# Every field of config.json that transformers' modelling reads, with other values, in every native type; an hour.
differential: $(VENV)/.installed-test
	cd tests && HF_HUB_OFFLINE=1 $(abspath $(BIN))/python -m differential

# The real client libraries, each group in an environment of its own; SHORT=1 leaves out the long group.
test-clients: $(VENV)/.installed-test
	$(BIN)/python tests/clients/run.py

# The unit tests with the lowest versions that pyproject.toml admits, in an environment of their own; but for torch, which
# `make fake-card` tests with another version. starlette's test client uses a name that anyio has given up since.
LOWEST := launcher router wire model_server
test-lowest: $(VENV)-lowest/.installed
	PYTHONPATH=src $(VENV)-lowest/bin/python -m pytest -n 2 --dist loadfile -W "ignore:The anyio.abc:DeprecationWarning" \
	    $(LOWEST:%=tests/unit/%)

# What the libraries that quantize models write, each in an environment of its own; about 20 minutes after the first
# time. ONLY="torchao autoawq" names the libraries.
test-quantizers: $(VENV)/.installed-test
	cd tests && HF_HUB_OFFLINE=1 $(abspath $(BIN))/python -m quantizers $(ONLY)

# The Triton kernels without a GPU, in an environment of their own: in Triton's interpreter, then compiled ahead of time.
# Then the same with the Triton of the GPU image. SHORT=1 leaves out the slow tests, the second Triton, and of the
# compilation all but sm_90.
kernels: $(VENV)-kernels/.installed $(if $(filter-out 0,$(SHORT)),,$(NEW_TRITON)/.installed)
	$(KBIN)/python -m pytest tests/kernels -n 2 $(if $(filter-out 0,$(SHORT)),-m "not slow")
	$(KBIN)/python -m pytest tests/gpu --collect-only -qq
	PYTHONPATH=src:tests/kernels $(KBIN)/python -m aot $(if $(filter-out 0,$(SHORT)),--targets 90)
ifeq ($(filter-out 0,$(SHORT)),)
	PYTHONPATH=$(NEW_TRITON) $(KBIN)/python -m pytest tests/kernels -n 2 -m "not slow"
	PYTHONPATH=$(NEW_TRITON):src:tests/kernels $(KBIN)/python -m aot --out build/kernels/aot-$(IMAGE_TRITON).json
endif

# The GPU path without a GPU (tests/fake_card): torch's CUDA build on stand-ins for its libraries. SHORT=1: the part of
# `make test-all`, three minutes, with the torch of the lock. The whole takes about two hours, and ends with the lines of src that
# touch a GPU's driver and did not run.
ifeq ($(filter-out 0,$(SHORT)),)
fake-card: $(foreach torch,$(CARD_TORCHES),$(call CARD_FOLDER,$(torch))/.prepared)
	rm -rf build/fake-card && mkdir -p build/fake-card
	$(foreach torch,$(CARD_TORCHES),FAKE_CARD_COVERAGE=$(CURDIR)/build/fake-card/coverage \
	    $(call CARD_RUN,$(torch)) python -m pytest tests/fake_card -n 2 --order both &&) true
	$(call CARD_RUN,$(LOCKED_TORCH)) python tests/fake_card/device_lines.py build/fake-card/coverage.* --least 0.95
else
fake-card: CARD = $(call CARD_FOLDER,$(LOCKED_TORCH))
fake-card: $(VENV)/.installed-test
	@$(MAKE) --no-print-directory $(CARD)/.prepared || { test -e $(CARD)/no-torch && \
	    echo "make fake-card is skipped: the package index gives no torch $(LOCKED_TORCH) for CUDA"; }
	@test -e $(CARD)/no-torch || $(call CARD_RUN,$(LOCKED_TORCH)) python -m pytest tests/fake_card -n 2 -m short --order random
endif

# On a machine with a card: PYTHON must have torch for CUDA (with its Triton), numpy, pytest and what the package needs.
test-gpu:
	$(PYTHON) -m pytest tests/gpu

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m docs.prose

bench: $(VENV)/.installed-test
	$(BIN)/python -m benchmarks.demo

# SHORT=--short takes less than a minute.
bench-router: $(VENV)/.installed-test
	$(BIN)/python -m benchmarks.router $(SHORT)

# Your own card and model (a folder or a hub id) against what the card allows, beside transformers and vLLM where they
# are installed: `make bench-gpu MODEL=...`. Without MODEL all stages, on models with random weights.
bench-gpu: $(VENV)/.installed-test
	$(BIN)/python -m benchmarks.gpu $(if $(MODEL),--model $(MODEL)) $(if $(STAGES),--stages $(STAGES))

# Every attack of tests/hostile on one server until the time is over, and a report in build/soak-report.md.
HOURS ?= 0.25
soak: $(VENV)/.installed-test
	PYTHONPATH=tests $(BIN)/python -m hostile --hours $(HOURS)

# Random load over several models with keys, priorities and batches, while models come, go and are killed.
soak-models: $(VENV)/.installed-test
	PYTHONPATH=tests $(BIN)/python -m hostile.several --hours $(HOURS)

# The oldest supported generator, in an environment of its own: its stubs load on every newer runtime.
stubs:
	$(CREATE) $(VENV)-stubs $(ASKED)
	$(VENV)-stubs/bin/pip install --quiet "grpcio-tools==1.66.2" "setuptools<80"
	$(VENV)-stubs/bin/python -m grpc_tools.protoc -Iwire=proto \
	    --python_out=src --pyi_out=src --grpc_python_out=src wire/v3/generate.proto wire/node/v1/node.proto wire/lora/v1/lora.proto wire/pooling/v1/pooling.proto

# What the images and the environments here install: every version, for the images with the hashes of its files, which
# pip does not take in constraints. Versions stay as they are, unless UPGRADE=1.
TORCH_CPU ?= --extra-index-url https://download.pytorch.org/whl/cpu --index-strategy unsafe-best-match
LOCK := $(VENV)-deploy/bin/uv pip compile pyproject.toml --extra trace -c constraints.txt \
    --python-version 3.11 --python-platform x86_64-manylinux_2_36 --only-binary :all: --no-annotate \
    --no-emit-index-url --no-emit-find-links --custom-compile-command "make locks" --quiet $(if $(UPGRADE),--upgrade)
locks: $(VENV)-deploy/.installed
	$(LOCK) --generate-hashes --output-file docker/requirements-cuda.txt
	$(LOCK) --generate-hashes $(TORCH_CPU) --output-file docker/requirements-cpu.txt
	$(LOCK) --extra test $(TORCH_CPU) -c docker/requirements-cpu.txt --no-emit-package torch --output-file $(LOCKED)

# The locked versions against a database of advisories, which has to be reached.
audit: $(VENV)-audit/.installed
	$(VENV)-audit/bin/python environment/audit.py

# A wheel for every Python and for every Linux with glibc 2.31, made from the source distribution; both in dist. Then
# each of PYTHONS serves the demo model from it.
PYTHONS        ?= $(PYTHON)
WHEEL_PLATFORM := manylinux_2_31_x86_64
WBIN           := $(abspath $(VENV)-wheel)/bin
wheel: $(VENV)-wheel/.installed
	rm -rf build/wheel dist
	$(WBIN)/python -m build --no-isolation --outdir build/wheel
	PATH=$(WBIN):$$PATH $(WBIN)/auditwheel repair --plat $(WHEEL_PLATFORM) --wheel-dir dist build/wheel/*.whl
	cp build/wheel/*.tar.gz dist
	WHEEL_PLATFORM=$(WHEEL_PLATFORM) WHEEL_PYTHONS="$(PYTHONS)" $(WBIN)/python -m pytest tests/wheel

# Dockerfiles, scripts, chart, manifests and queries before the tools that know them; needs no engine and no cluster.
check-deploy: $(VENV)-deploy/.installed
	$(VENV)-deploy/bin/python -m pytest tests/deploy

# The site, in build/site; strict: a link that leads nowhere, or a page that loads anything from elsewhere, fails.
docs: $(VENV)-docs/.installed
	NO_MKDOCS_2_WARNING=1 $(VENV)-docs/bin/mkdocs build --strict --quiet
	$(VENV)-docs/bin/python docs/site/check.py build/site

# docs/reference, from the declarations in the code; a test fails where it is stale.
reference: $(VENV)/.installed-test
	$(BIN)/python -m docs.generate

# Refuses a Python that is too old, in one line, before anything is made.
CREATE := environment/create.sh $(PYTHON)
ASKED  := "make $(or $(firstword $(MAKECMDGOALS)),run)"

# torch goes first and alone: a looser request would fetch gigabytes of CUDA libraries. TORCH=cpu or TORCH=cuda instead
# of what fits the machine, TORCH_INDEX=URL for a package index beside those of pip's configuration.
INSTALL_TORCH := environment/install_torch.py $(if $(TORCH),--build $(TORCH)) $(if $(TORCH_INDEX),--index $(TORCH_INDEX))

# On a terminal pip shows what it does.
PIP_INSTALL := test -t 1 || quiet=--quiet; $(BIN)/pip install $$quiet $(PIN)

$(VENV)/.torch: constraints.txt
	@$(CREATE) $(VENV) $(ASKED)
	@$(BIN)/python $(INSTALL_TORCH)
	@touch $@

$(VENV)-kernels/.installed: constraints.txt $(LOCKED) tests/kernels/requirements.txt tests/kernels/requirements-no-deps.txt
	@$(CREATE) $(VENV)-kernels $(ASKED)
	@$(KBIN)/python $(INSTALL_TORCH) --build cpu
	$(KBIN)/pip install --quiet $(PIN) -r tests/kernels/requirements.txt
	$(KBIN)/pip install --quiet --no-deps -r tests/kernels/requirements-no-deps.txt
	touch $@

$(NEW_TRITON)/.installed: $(VENV)-kernels/.installed docker/requirements-cuda.txt
	rm -rf $(@D)
	$(KBIN)/pip install --quiet --no-deps --target $(@D) triton==$(IMAGE_TRITON)
	touch $@

$(VENV)-card/torch-%/.prepared: $(VENV)/.installed-test tests/fake_card/prepare.py $(wildcard tests/fake_card/libraries/*)
	$(BIN)/python tests/fake_card/prepare.py $(@D) $*
	touch $@

$(VENV)-deploy/.installed: tests/deploy/requirements.txt
	$(CREATE) $(VENV)-deploy $(ASKED)
	$(VENV)-deploy/bin/pip install --quiet -r tests/deploy/requirements.txt
	touch $@

$(VENV)-audit/.installed: Makefile
	$(CREATE) $(VENV)-audit $(ASKED)
	$(VENV)-audit/bin/pip install --quiet "pip-audit==2.10.1"
	touch $@

$(VENV)-wheel/.installed: tests/wheel/requirements.txt
	$(CREATE) $(VENV)-wheel $(ASKED)
	$(VENV)-wheel/bin/pip install --quiet -r tests/wheel/requirements.txt
	touch $@

# torch stays the one of constraints.txt; the C++ operators are those beside their sources, if any.
$(VENV)-lowest/.installed: pyproject.toml constraints.txt $(VENV)-deploy/.installed
	@$(CREATE) $(VENV)-lowest $(ASKED)
	@$(VENV)-lowest/bin/python $(INSTALL_TORCH) --build cpu
	echo torch > $(VENV)-lowest/excluded.txt
	$(VENV)-deploy/bin/uv pip compile pyproject.toml --extra test --resolution lowest-direct --excludes $(VENV)-lowest/excluded.txt \
	    --python $(VENV)-lowest/bin/python --python-platform x86_64-manylinux_2_36 --only-binary :all: --quiet --output-file $(VENV)-lowest/lowest.txt
	$(VENV)-deploy/bin/uv pip install --quiet --python $(VENV)-lowest/bin/python --no-deps -r $(VENV)-lowest/lowest.txt
	CXX=false $(VENV)-deploy/bin/uv pip install --quiet --python $(VENV)-lowest/bin/python --no-deps .
	touch $@

$(VENV)-docs/.installed: docs/site/requirements.txt
	$(CREATE) $(VENV)-docs $(ASKED)
	$(VENV)-docs/bin/pip install --quiet -r docs/site/requirements.txt
	touch $@

# An editable install builds the C++ operators beside their sources: the best set of instructions that this CPU has, for
# tests all that it has. pip hides what the compiler says: whether there are any now is told afterwards.
BUILT_FROM := pyproject.toml setup.py src/model_server/cpp/instruction_sets.py $(wildcard src/model_server/cpp/source/*)
OPERATORS  := PYTHONPATH=src $(BIN)/python -m model_server.cpp || true

$(VENV)/.installed: $(VENV)/.torch $(LOCKED) $(BUILT_FROM)
	@echo "Installing Tercet and what it needs: about 70 MB to download"
	@$(PIP_INSTALL) --editable .
	@$(OPERATORS)
	@touch $@

$(VENV)/.installed-test: $(VENV)/.torch $(LOCKED) $(BUILT_FROM)
	@echo "Installing Tercet and what its tests need: about 155 MB to download"
	@OPERATOR_SETS=supported; export OPERATOR_SETS; $(PIP_INSTALL) --editable ".[test]"
	@$(OPERATORS)
	@touch $@ $(VENV)/.installed

# Built anew after a change of their sources, with what the compiler says.
operators: $(VENV)/.torch
	$(BIN)/pip install --quiet "setuptools>=77"
	OPERATOR_SETS=supported $(BIN)/python setup.py --quiet build_ext --inplace
	@$(OPERATORS)

clean:
	rm -rf $(VENV) $(VENV)-stubs $(VENV)-kernels $(VENV)-card $(VENV)-deploy $(VENV)-docs $(VENV)-audit $(VENV)-wheel $(VENV)-lowest .venv-clients build dist src/*.egg-info \
	    src/model_server/cpp/*.so
