# `make run` and `make test` are all that a newcomer needs; each makes .venv first if it is not there.

PYTHON ?= python3
VENV := .venv
VENV36 := .venv-triton36
OLD_TRITON := 3.6.0

# A file of tests to a process, two at a time; torch's CPU kernels have small shapes here, more threads would only wait
# for each other.
WORKERS ?= 2
PARALLEL = -n $(WORKERS) --dist loadfile
TEST = OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest $(PARALLEL)
TEST36 = OMP_NUM_THREADS=1 $(VENV36)/bin/python -m pytest $(PARALLEL)

.DEFAULT_GOAL := help
.PHONY: help run install test test-all test-slow test-triton36 check clean

help: ## list these commands
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

run: install ## capture, build, verify, measure and choose for KDA; writes a report
	$(VENV)/bin/kda2 run kda

test: install ## the tests: those with a GPU are skipped where there is none
	$(TEST) -m "not slow and not interpreter"
	TRITON_INTERPRET=1 $(TEST) --dist load -m "interpreter and not slow"

test-all: test-slow test-triton36 ## the longer tests, and those of the kernels under the oldest supported Triton

# pytest exits with 5 where no test has both marks.
test-slow: install
	TRITON_INTERPRET=1 $(TEST) --dist load -m "slow and interpreter" --timeout 1200 || [ $$? -eq 5 ]
	$(TEST) --dist load -m "slow and not interpreter" --timeout 1200

test-triton36: $(VENV36)/installed
	$(TEST36) -m "not slow and not interpreter" tests/backends tests/compile
	TRITON_INTERPRET=1 $(TEST36) --dist load -m "interpreter and not slow" tests/backends
	TRITON_INTERPRET=1 $(TEST36) --dist load -m "interpreter and not slow" tests/ops/kda/test_triton.py -k "family or packed"

check: ## style, types, import direction, quick tests, stale records
	scripts/check

install: $(VENV)/installed ## make .venv, or bring it up to date

$(VENV)/installed: pyproject.toml constraints.txt
	$(call make-venv,$(VENV),workbench$(,)test$(,)dev)
	@touch $@

# triton 3.6.0 goes in last and alone: torch's own metadata asks for the Triton it was released with.
$(VENV36)/installed: pyproject.toml constraints.txt
	$(call make-venv,$(VENV36),workbench$(,)test)
	@$(VENV36)/bin/python -m pip install --quiet --no-deps triton==$(OLD_TRITON)
	@touch $@

clean: ## remove the environments and every cache
	rm -rf $(VENV) $(VENV36) .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist
	find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +

, := ,
define make-venv
@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit( \
  "kda2 needs Python 3.11 or 3.12, $(PYTHON) is %d.%d; name another with: make PYTHON=python3.12" % v[:2])'
@echo "Installing kda2 into $(1)"
@$(PYTHON) -m venv $(1)
@$(1)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[$(2)]'
endef
