# nvoffload: two commands do everything, `make demo` and `make test`; `make help` lists the rest.
#
# Everything is made in .venv. To use an environment of your own, name it: make test VENV=$CONDA_PREFIX

PYTHON ?= python3
VENV ?= .venv
# A machine without an NVIDIA GPU gets one known version, so that its runs are repeatable.
TORCH ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo 'torch>=2.11,<2.15' || echo 'torch==2.13.0')
DEMO_ARGS ?=
TEST_ARGS ?=
BENCH_DIR ?= .
BENCH_ARGS ?=

PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --quiet --disable-pip-version-check
NATIVE := $(wildcard native/*.c native/*.h) native/build.py setup.py
CORE := nvoffload/_native.abi3.so
# One mark per finished stage, inside the environment that it is about.
TOOLS_DONE := $(VENV)/.nvoffload-tools
TORCH_DONE := $(VENV)/.nvoffload-torch
PACKAGE_DONE := $(VENV)/.nvoffload-package
TEST_DONE := $(VENV)/.nvoffload-test
DEV_DONE := $(VENV)/.nvoffload-dev

.DELETE_ON_ERROR:
.PHONY: help demo test build env lint format bench clean

help:
	@echo 'make demo    train a small transformer whose parameters and AdamW states live in swap files'
	@echo '             DEMO_ARGS="--size 10M --steps 20 --path /mnt/ssd"'
	@echo 'make test    run the tests                  TEST_ARGS="-k kernel -x"'
	@echo 'make bench   measure a folder'"'"'s disk        BENCH_DIR=/mnt/ssd BENCH_ARGS=--json'
	@echo 'make build   make .venv and the C core      NVO_CFLAGS="-g -Werror"'
	@echo 'make lint    ruff and mypy'
	@echo 'make format  let ruff rewrite the Python files'
	@echo 'make clean   remove what was built; .venv stays'
	@echo
	@echo 'PYTHON=python3.12   the interpreter that .venv is made with (3.11 to 3.13)'
	@echo 'VENV=/path/to/env   an environment of your own; a torch in it is used as it is'
	@echo 'TORCH=torch==2.14.0 what pip installs where there is no torch'

demo: build
	$(PY) -m nvoffload.demo $(DEMO_ARGS)

test: build $(TEST_DONE)
	$(PY) -m pytest $(TEST_ARGS)

bench: build
	$(PY) -m nvoffload.bench $(BENCH_DIR) $(BENCH_ARGS)

lint: build $(DEV_DONE)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: $(DEV_DONE)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

build: $(CORE)

# Everything that the other targets install.
env: build $(TEST_DONE) $(DEV_DONE)

clean:
	rm -rf build dist nvoffload.egg-info $(CORE) nvoffload/_native.c
	rm -rf .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find nvoffload native tests benchmarks -name __pycache__ -type d -exec rm -rf {} +

# ---- stages ----------------------------------------------------------------------

# Without prerequisites: an environment that is there is taken as it is.
$(PY):
	@$(check_python)
	@echo "making $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(TOOLS_DONE): pyproject.toml | $(PY)
	@$(check_compiler)
	@echo "installing build tools"
	@$(PIP) 'setuptools>=77' wheel 'cffi>=2.0'
	@touch $@

# A torch that fits is never replaced; one that doesn't is the user's to change.
$(TORCH_DONE): | $(TOOLS_DONE)
	@$(PY) -c "$$check_torch"; case $$? in \
	    0) ;; \
	    3) echo "installing $(TORCH) (this takes a while)"; $(PIP) 'numpy>=1.26' '$(TORCH)' ;; \
	    *) exit 1 ;; \
	esac
	@touch $@

$(PACKAGE_DONE): pyproject.toml setup.py | $(TORCH_DONE)
	@echo "installing nvoffload, editable, and building its C core"
	@$(PIP) --no-build-isolation --editable .
	@touch $(CORE) $@

# The install above has just built it, unless it was there before.
$(CORE): $(NATIVE) | $(PACKAGE_DONE)
	@test -e $@ && test -z "$$(find $(NATIVE) -newer $@)" || { echo "building the C core"; \
	    $(PY) -W ignore setup.py --quiet build_ext --inplace --force && touch $@; }

$(TEST_DONE): pyproject.toml | $(PACKAGE_DONE)
	@$(PY) -c "$$print_group" test > $@.txt
	@$(PIP) --requirement $@.txt
	@touch $@

$(DEV_DONE): pyproject.toml | $(PACKAGE_DONE)
	@$(PY) -c "$$print_group" dev > $@.txt
	@$(PIP) --requirement $@.txt
	@touch $@

# ---- what the stages ask ------------------------------------------------------------

define check_python
command -v $(PYTHON) >/dev/null || { \
    echo "$(PYTHON) was not found. On Debian or Ubuntu: apt-get install python3 python3-venv python3-dev" >&2; exit 1; }; \
$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
    echo "$$($(PYTHON) --version) is too old: nvoffload needs 3.11 or newer. Name another: make PYTHON=python3.12" >&2; \
    exit 1; }; \
$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
    name=$$($(PYTHON) -c 'import sys; print("python%d.%d" % sys.version_info[:2])'); \
    echo "$(PYTHON) can't make environments. On Debian or Ubuntu: apt-get install $$name-venv" >&2; exit 1; }
endef

define check_compiler
cc=$${CC:-$$($(PY) -c 'import sysconfig; print(sysconfig.get_config_var("CC") or "cc")')}; \
command -v $${cc%% *} >/dev/null || { \
    echo "no C compiler ($$cc). On Debian or Ubuntu: apt-get install gcc libc6-dev" >&2; exit 1; }; \
echo '#include <stdlib.h>' | $$cc -E -x c - >/dev/null 2>&1 || { \
    echo "$$cc finds no C headers. On Debian or Ubuntu: apt-get install libc6-dev" >&2; exit 1; }; \
$(PY) -c 'import os, sys, sysconfig; p = sysconfig.get_paths(); \
sys.exit(not any(os.path.exists(p[k] + "/Python.h") for k in ("include", "platinclude")))' || { \
    name=$$($(PY) -c 'import sys; print("python%d.%d" % sys.version_info[:2])'); \
    echo "the Python headers are missing. On Debian or Ubuntu: apt-get install $$name-dev" >&2; exit 1; }
endef

define check_torch
import sys
try:
    import torch
except ModuleNotFoundError:
    sys.exit(3)
found = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
if not (2, 11) <= found < (2, 15):
    sys.exit(f"torch {torch.__version__} is in $(VENV); nvoffload needs 2.11 to 2.14. Change it there, or use another VENV.")
print(f"using torch {torch.__version__}, which is there")
endef
export check_torch

define print_group
import sys, tomllib
with open("pyproject.toml", "rb") as file:
    print(*tomllib.load(file)["dependency-groups"][sys.argv[1]], sep="\n")
endef
export print_group
