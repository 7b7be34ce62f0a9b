# Everything happens in .venv, which the first target that needs it makes (tools/make_venv.py says how).
#
# PYTHON         the Python to start from, 3.11 or newer. If its torch drives GPUs, that torch is used as it is.
# TORCH_INSTALL  what pip installs as torch where there is none. On Linux a plain index gives the CUDA build, some
#                gigabytes; PyTorch's installation page lists indexes of smaller, CPU-only builds. Use one with
#                    make demo TORCH_INSTALL="torch==2.13.0 --index-url <index of CPU builds>"
# TRY            what `make versions` tries: "3.11:2.11 3.13:newest"; "--pip '--index-url <index of CPU builds>'" is
#                an option for it. All Pythons here with all minor versions of torch on the index if empty.
# RESULTS        file for what `make test-device`, `make asan` and `make sanitize` find; folder for the files of `make results`.
# STUDIES        what `make results` measures, such as "c3 fsdp-1"; all if empty (MEASURE=--list shows them).
# BEFORE         folder of earlier results: `make results` says what is slower than there, and ends with an error then.
# MEASURE        its further options: --list, --again, --dry-run (tools/measure_node.py).
# DEMO, TESTS    further options of `sidelane demo`; what pytest runs in `make test`.
# QUICK          what pytest runs in `make check`: it skips those that start ranks.
# DEVICE_TESTS   files of tests for `make test-device`, where GPUs are lent for less than all takes; all if empty.
# TORCH_TESTS    options of `make test-torch`: "--device=gpu --jobs 6 --page compatibility-gpus.md" asks GPUs and NCCL.
# YARDSTICK      options of `make yardstick`: "--jobs 8 --seconds 540 --out found.json" goes on from that file when called again.
# STEPS          how many `make test-steps` makes.
# SECONDS        after which `make results` ends, to go on in the next call (no limit if empty), and `make attack` (600).
# SEED           which cases `make attack` makes up; others each time if empty.
# ATTACK         its further options: "--case 7" runs one case again, "--output FILE" writes all that was found.
# ASAN           tests and options of pytest for `make asan`; the tests of native code and made-up drivers if empty.
# CLIENTS        which programs `make test-clients` runs, such as "torch_dcp lightning_ddp"; all if empty.
# SOAK           options of `make soak`: "--minutes 60 --seed 1 --text soak.txt", "--help".
# PARALLEL       how `make test` shares the test files among processes. Most tests start ranks of their own: few is best.
#                A process that crashes is named and not replaced: with another one in its place the run hung at its end.

PYTHON ?= python3
TORCH_INSTALL ?= torch==2.13.0
TRY ?=
RESULTS ?=
STUDIES ?=
DEMO ?=
QUICK ?= tests/c3 tests/choice tests/execute tests/machine tests/memory tests/program tests/session tests/sim/test_physics.py \
  tests/inside/c3 tests/inside/execute tests/inside/memory tests/inside/program tests/inside/session \
  tests/test_house.py tests/test_errors.py --ignore=tests/execute/test_addresses.py --ignore=tests/choice/test_choice_cli.py \
  --ignore=tests/execute/test_executor_property.py --ignore=tests/program/test_verify_pairs.py
TESTS ?= tests contrib --ignore=tests/device --ignore=tests/restart --ignore=tests/leaks
DEVICE_TESTS ?=
MEASURE ?=
SECONDS ?=
SEED ?=
ATTACK ?=
YARDSTICK ?=
ASAN ?=
CLIENTS ?=
SOAK ?=
PARALLEL ?= --numprocesses 3 --dist loadfile --max-worker-restart=0

# Not `pip install .[docs]`, which would put another sidelane next to the one of this checkout.
export DOCS_REQUIREMENTS := import tomllib; \
  print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")

# Of the hundreds of processes of a run each would compile all that it imports, where an image sets this.
unexport PYTHONDONTWRITEBYTECODE

BIN := .venv/bin
READY := .venv/.ready

.DEFAULT_GOAL := help
.PHONY: help asan check coverage demo goldens hooks nightly quick specs test pytest test-device test-torch versions test-long test-restart test-steps test-clients attack soak sanitize yardstick results wheel docs docs-pages size lint style types format venv clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

demo: $(READY) ## run a GEMM next to a collective on whatever is here; table, and report/index.html
	@$(BIN)/sidelane demo $(DEMO)

check: $(READY) ## lint, check types, run the tests that start no ranks: a minute on two cores
	@$(MAKE) --no-print-directory style && $(MAKE) --no-print-directory --jobs=2 --keep-going types quick

quick: $(READY)
	@echo "[sidelane] tests without ranks"
	@$(BIN)/python -m pytest -q --numprocesses 2 --dist loadfile -m "not long and not device" --no-ranks $(QUICK)

# An environment that borrows the packages of another Python may lack the linters, and a machine with GPUs the network.
# Types are checked beside the tests: mypy has one process, and the tests do not always have work for every core.
test: $(READY) ## lint, check types, run every test that needs no GPU
	@if [ -e .venv/borrowed ] && ! $(BIN)/python -c "import ruff, mypy, rumdl, codespell_lib" 2>/dev/null; \
	then echo "[sidelane] NOT CHECKED: linters are missing here"; $(MAKE) --no-print-directory pytest; \
	else $(MAKE) --no-print-directory style && $(MAKE) --no-print-directory --jobs=2 --keep-going types pytest; fi

pytest: $(READY)
	@echo "[sidelane] tests"
	@$(BIN)/python -m pytest $$($(BIN)/python -c "import xdist" 2>/dev/null && echo $(PARALLEL)) -m "not long and not device" --most-cpu-seconds 8 $(TESTS)

test-long: $(READY) ## run the longer tests that `make test` leaves out
	@$(BIN)/python -m pytest -m "long and not device" $(TESTS)

nightly: $(READY) ## all that `make test` leaves out and needs no GPU: hours
	@for each in specs docs test-long test-restart test-clients attack soak coverage yardstick asan; \
	do $(MAKE) --no-print-directory $$each || failed="$$failed $$each"; done; [ -z "$$failed" ] || { echo "failed:$$failed"; exit 1; }

coverage: $(READY) ## measure lines and branches of the library by folder, ranks included, beside the last yardstick; an hour
	@PYTHONPATH=src $(BIN)/python tools/yardstick.py coverage --jobs 2 $(YARDSTICK)

goldens: $(READY) ## write the texts of tests/goldens anew: errors, plans, answers of the command line
	@GOLDENS=write $(BIN)/python -m pytest -q -m "not device" $$(grep -rl --include="test_*.py" check_golden tests)

test-device: $(READY) ## run the tests that need GPUs; RESULTS=file writes a summary
	@$(BIN)/python tools/device_tests.py $(DEVICE_TESTS) $(if $(RESULTS),--summary "$(RESULTS)")

test-torch: $(READY) ## run PyTorch's own tests on the process group, and on Gloo, on CPU ranks; 5 to 10 minutes
	@$(BIN)/python -c "import expecttest" 2>/dev/null || $(BIN)/python -m pip install --quiet expecttest
	@PYTHONPATH=src $(BIN)/python -W ignore tools/torch_suite.py $(or $(TORCH_TESTS),--page docs/reference/compatibility.md)

versions: $(READY) ## try Python 3.11 to 3.14 with torch 2.11 to the newest; TRY="3.11:2.11 3.13:newest"
	@PYTHONPATH=src $(BIN)/python tools/versions.py $(TRY)

specs: $(READY) ## explore the models of protocols, which are apart from the code; ten seconds
	@$(BIN)/python -m pytest -q specs

test-restart: $(READY) ## kill a rank of programs that train, and see torchrun start them again; a minute
	@$(BIN)/python -m pytest tests/restart

test-steps: $(READY) ## train 10,000 steps of random sizes, and see that nothing leaks or slows down; half an hour; STEPS=1000
	@STEPS="$(STEPS)" $(BIN)/python -m pytest tests/leaks

test-clients: .venv-clients/.ready .venv-clients/sglang/.ready .venv-clients/vllm/.ready ## run accelerate, Trainer, Lightning, torchtitan, vLLM, SGLang and others between CPU ranks; 20 minutes
	@for each in sglang vllm; do .venv-clients/$$each/bin/python tests/clients/server_contracts.py; done
	@CUDA_VISIBLE_DEVICES= .venv-clients/bin/python tests/clients/run.py $(CLIENTS)

# An environment of their own: these programs want versions of packages that the tools here do not.
.venv-clients/.ready: tests/clients/requirements.txt tests/clients/requirements-alone.txt
	@test -x .venv-clients/bin/python || $(PYTHON) -m venv .venv-clients
	@.venv-clients/bin/python -m pip install --quiet $(TORCH_INSTALL)
	@.venv-clients/bin/python -m pip install --quiet -e . -e ./lab -r tests/clients/requirements.txt
	@DS_BUILD_OPS=0 .venv-clients/bin/python -m pip install --quiet --no-deps -r tests/clients/requirements-alone.txt
	@touch "$@"

.venv-clients/sglang/.ready: tests/clients/requirements-sglang.txt tests/clients/requirements-sglang-alone.txt .venv-clients/.ready
	@test -x .venv-clients/sglang/bin/python || $(PYTHON) -m venv .venv-clients/sglang
	@.venv-clients/sglang/bin/python -m pip install --quiet $(TORCH_INSTALL)
	@.venv-clients/sglang/bin/python -m pip install --quiet -e . -r tests/clients/requirements-sglang.txt
	@.venv-clients/sglang/bin/python -m pip install --quiet --no-deps -r tests/clients/requirements-sglang-alone.txt
	@touch "$@"

.venv-clients/vllm/.ready: tests/clients/requirements-vllm.txt .venv-clients/.ready
	@test -x .venv-clients/vllm/bin/python || $(PYTHON) -m venv .venv-clients/vllm
	@.venv-clients/vllm/bin/python -m pip install --quiet $(TORCH_INSTALL)
	@.venv-clients/vllm/bin/python -m pip install --quiet --no-deps -e . -r tests/clients/requirements-vllm.txt
	@touch "$@"

attack: $(READY) ## try to prove verify wrong, with random programs and schedules; SECONDS=600 SEED=1
	@PYTHONPATH=src:tests:tests/common $(BIN)/python -m attack --seconds $(or $(SECONDS),600) $(if $(SEED),--seed $(SEED)) $(ATTACK)

soak: $(READY) ## make random calls, check every byte, and let ranks fail; a minute; SOAK="--minutes 60"
	@PYTHONPATH=src:tests:tests/common $(BIN)/python -m soak $(SOAK)

asan: $(READY) ## run the tests of native code and made-up drivers under AddressSanitizer and UBSan; 20 minutes; ASAN="tests/native"
	@PYTHONPATH=src $(BIN)/python tools/asan.py $(if $(RESULTS),--out "$(RESULTS)") $(ASAN)

sanitize: $(READY) ## look into every kernel with compute-sanitizer; needs a GPU; RESULTS=file writes what was found
	@$(BIN)/python tools/sanitize_kernels.py $(if $(RESULTS),--out "$(RESULTS)")

yardstick: $(READY) ## run the killer of each of 400 fixed mutants, and see that it still fails; 45 minutes on two cores
	@PYTHONPATH=src $(BIN)/python tools/yardstick.py check $(YARDSTICK)

results: $(READY) ## measure a machine with GPUs: all that is published, into the folder RESULTS; SECONDS=600 at a time
	@PYTHONPATH=src $(BIN)/python tools/measure_node.py --out "$(or $(RESULTS),$(error RESULTS=folder is needed))" \
	  $(if $(SECONDS),--seconds $(SECONDS)) $(if $(BEFORE),--before "$(BEFORE)") $(MEASURE) $(STUDIES)

wheel: $(READY) ## build the sdist and the wheels into dist, and try them where there is no C compiler
	@PYTHONPATH=src $(BIN)/python tools/release.py

docs: $(READY) ## build the site of docs/ into build/docs; a broken link or reference ends it
	@$(BIN)/python -c "import furo, myst_parser, sphinx" 2>/dev/null || { echo "[sidelane] installing sidelane[docs]"; \
	$(BIN)/python -c "$$DOCS_REQUIREMENTS" | xargs "$(PYTHON)" -m pip --python $(BIN)/python install -q; }
	@echo "[sidelane] site"
	@$(BIN)/python -m sphinx -q -E -W --keep-going -c tools/docs docs build/docs
	@echo "[sidelane] build/docs/index.html"

docs-pages: $(READY) ## write the pages and tables of docs/ that are made from the code and from results/
	@$(BIN)/python tools/make_docs.py

size: $(READY) ## count statements, lines and files of each part; lower the counts in tools/house.toml that fell
	@$(BIN)/python tools/house.py

lint: style types ## ruff, rumdl, codespell and mypy

hooks: $(READY) ## let git run the linters and the house rules on what you commit (.pre-commit-config.yaml)
	@$(BIN)/pre-commit install

style: $(READY)
	@echo "[sidelane] ruff check"
	@$(BIN)/python -m ruff check .
	@echo "[sidelane] ruff format --check"
	@$(BIN)/python -m ruff format --check .
	@echo "[sidelane] rumdl: links and widths of pages"
	@$(BIN)/rumdl check --quiet .
	@echo "[sidelane] codespell"
	@$(BIN)/codespell

types: $(READY)
	@echo "[sidelane] mypy"
	@$(BIN)/python -m mypy

format: $(READY) ## let ruff format the code and mend what it can
	@$(BIN)/python -m ruff check --fix --quiet . ; $(BIN)/python -m ruff format .

venv: $(READY) ## make .venv and nothing else

$(READY): pyproject.toml lab/pyproject.toml tools/lock.txt tools/make_venv.py
	@"$(PYTHON)" tools/make_venv.py --torch "$(TORCH_INSTALL)"
	@touch "$@"

clean: ## remove .venv, the report and every cache
	rm -rf .venv .venv-clients report build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
	find src contrib tests tools examples -name __pycache__ -prune -exec rm -rf {} +
