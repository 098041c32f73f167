# The two commands of a new user: `make demo` and `make test`. Everything else is for developers.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
MODELS ?= .models
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: help demo chat test bench lint fix models clean
.DEFAULT_GOAL := help

help:
	@echo "make demo    set up, fetch a small model, convert it with River, answer a prompt"
	@echo "make chat    talk to the demo bundle"
	@echo "make test    the test suite (set ADAPT_MODELS or run 'make models' for the tests on real models)"
	@echo "make bench   measure BUNDLES (default: the demo bundle) and write bench-tables.md; see docs/benchmarks.md"
	@echo "make lint    ruff, basedpyright, import contract"
	@echo "make fix     ruff --fix and format"
	@echo "make models  fetch the small real models that the marked tests use"

# What setuptools warns of here (a table it calls experimental, an editable installation) is meant so.
$(BIN)/adapt: pyproject.toml constraints.txt $(wildcard quant/kernels/*.[ch])
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip
	PYTHONWARNINGS=ignore $(BIN)/python -m pip install -q -c constraints.txt -e .
	@touch $@

$(VENV)/.dev: $(BIN)/adapt
	$(BIN)/python -m pip install -q -c constraints.txt --group dev
	@touch $@

$(MODELS)/smollm2-135m-instruct.gguf: | $(BIN)/adapt
	$(BIN)/python tests/fetch_models.py $(MODELS) smollm2

models: $(BIN)/adapt
	$(BIN)/python tests/fetch_models.py $(MODELS)

# rtn needs no pass over a text, so the demo is quick; the default, gptq, gives better exit layers.
# A newer program reads the bundle that is there; it is made anew only for a newer model.
demo-bundle/adapt.json: $(MODELS)/smollm2-135m-instruct.gguf | $(BIN)/adapt
	$(BIN)/adapt convert $< --method river --quantizer rtn --group-size 32 --force -o demo-bundle

demo: $(BIN)/adapt demo-bundle/adapt.json
	$(BIN)/adapt inspect demo-bundle
	$(BIN)/adapt run demo-bundle "Why is the sky blue? Answer in two sentences." --max-tokens 96 --stats

chat: $(BIN)/adapt demo-bundle/adapt.json
	$(BIN)/adapt chat demo-bundle

test: $(VENV)/.dev
	ADAPT_MODELS=$${ADAPT_MODELS:-$(MODELS)} $(BIN)/python -m pytest $(PYTEST_ARGS)

# Run it alone on the machine. TEXT, ROWS and DENSE are optional: see tests/bench/tables.py.
BUNDLES ?= demo-bundle
TABLES ?= bench-tables.md
bench: $(VENV)/.dev $(if $(filter demo-bundle,$(BUNDLES)),demo-bundle/adapt.json)
	$(BIN)/python tests/bench/tables.py $(TABLES) $(BUNDLES) $(if $(TEXT),--text $(TEXT)) $(if $(ROWS),--rows $(ROWS)) \
		$(if $(DENSE),--dense $(DENSE)) --against transformers

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright
	$(BIN)/lint-imports

fix: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist demo-bundle *.egg-info
