# Two commands for a newcomer: `make lab` and `make test`. Both make .venv first, when it is missing or out of date.
#   make lab LAB_ARGS="--no-browser --port 9999"    arguments for JupyterLab
#   make test PHASES="lint unit"                    some of the phases
#   COURSE_VENV=/big/disk/venv make lab             the environment in another folder

PYTHON ?= python3
COURSE_VENV ?= .venv
export COURSE_VENV

# What tools start by name (nbgrader starts alembic, a cell starts torchrun) must be the environment's own.
IN_VENV := PATH="$$(cd "$(COURSE_VENV)" && pwd)/bin:$$PATH"
VENV_PYTHON := $(IN_VENV) "$(COURSE_VENV)/bin/python"

# JupyterLab refuses to start on a notebook that is not there. The file is for the browser that it opens, the
# default_url for the address that it prints.
START_PAGE := $(wildcard chapters/00_ranks.ipynb)
OPEN_START_PAGE := $(if $(START_PAGE),--LabApp.default_url=/lab/tree/$(START_PAGE) $(START_PAGE))
# JupyterLab refuses to start as root, as one is in a container, unless told to.
ALLOW_ROOT := $(if $(filter 0,$(shell id -u)),--allow-root)

# A newcomer's first sight is the lesson: no question about news, no advice to update what is pinned. These are
# defaults, which JupyterLab's own settings override.
LAB_DEFAULTS := JUPYTER_CONFIG_PATH="$(CURDIR)/shared/jupyter$${JUPYTER_CONFIG_PATH:+:$$JUPYTER_CONFIG_PATH}"

.DEFAULT_GOAL := help
.PHONY: help lab doctor test gpu mutants notebooks bench release grade clean python environment environment-dev

help: ## List these commands
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' Makefile

lab: environment ## Open the course in JupyterLab
	@$(LAB_DEFAULTS) $(VENV_PYTHON) -m jupyterlab --ServerApp.root_dir=. $(ALLOW_ROOT) $(LAB_ARGS) $(OPEN_START_PAGE)

doctor: environment ## Say whether the course can run here, and what to do where not
	@$(VENV_PYTHON) -m shared.ranks.machine

test: environment-dev ## Run every check: lint, unit tests, notebooks
	@$(VENV_PYTHON) -m tests.run $(PHASES)

mutants: environment-dev ## Say which check caught how many wrong solutions, chapter by chapter
	@$(VENV_PYTHON) -m tests.mutation_report

gpu: environment-dev ## Run what needs GPUs, and measure there: the report comes into build/gpu/
	@$(VENV_PYTHON) -m tests.gpu

notebooks: environment-dev ## Rebuild the notebooks from source/
	@$(VENV_PYTHON) -m instructor.build

bench: environment-dev ## Measure starts, instruments, collectives and training steps on this machine
	@$(VENV_PYTHON) -m benchmarks.ranks
	@$(VENV_PYTHON) -m benchmarks.instruments
	@$(VENV_PYTHON) -m benchmarks.collectives
	@$(VENV_PYTHON) -m benchmarks.ladder
	@$(VENV_PYTHON) -m benchmarks.stages

release: environment-dev ## CHAPTER=04: write the students' bundle of a chapter into build/release/
	@$(VENV_PYTHON) -m instructor.release $(CHAPTER)

grade: environment-dev ## SUBMISSIONS=dir [CHAPTER=04]: grade students' notebooks into build/grades/
	@$(VENV_PYTHON) -m instructor.grade "$(SUBMISSIONS)" $(if $(CHAPTER),--chapter $(CHAPTER)) $(GRADE_ARGS)

clean: ## Remove .venv and caches
	rm -rf .venv .pytest_cache .ruff_cache build *.egg-info
	find . -name .git -prune -o -type d \( -name __pycache__ -o -name .ipynb_checkpoints \) -prune -exec rm -rf {} +

environment: python
	@$(PYTHON) bootstrap.py

environment-dev: python
	@$(PYTHON) bootstrap.py --dev

python:
	@command -v $(PYTHON) >/dev/null || { echo "The course needs Python 3.11 to 3.14: there is no $(PYTHON) here."; exit 1; }
