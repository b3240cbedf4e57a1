# Two commands for a newcomer: `make lab` and `make test`. Both create .venv first if it is missing or out of date.
#   make lab LAB_ARGS="--no-browser --port 9999"    arguments for JupyterLab
#   make test CHAPTER=08                            the tests, mutants, variants and notebooks of a chapter
#   make test ALL=1                                 everything, as in CI, with all mutants and variants
#   make test LAST_FAILED=1                         the tests that failed the last time
#   make test PHASES="lint unit"                    only some of the phases
#   make gpu GPU_ARGS="--steps start,nccl-semantics"  some steps on this machine's GPUs; --dry tries them without one
#   make lab COURSE_VENV=/big/disk/venv             put the environment into another folder
#   make lab COURSE_TORCH=2.14.1                    this torch instead of the one for this machine (see bootstrap.py)
#   make lab COURSE_PYTHON=python                   use an environment of your own, such as conda's

PYTHON ?= python3
COURSE_VENV ?= .venv
export COURSE_VENV
COURSE_PYTHON ?= $(PYTHON) bootstrap.py

# JupyterLab does not start if it is told to open a file that does not exist. The browser opens the file; the
# default_url is for the address that JupyterLab prints.
START_PAGE := $(wildcard START_HERE.md)
OPEN_START_PAGE := $(if $(START_PAGE),--LabApp.default_url=/lab/tree/$(START_PAGE) $(START_PAGE))
# JupyterLab does not start as root, which is usual in a container, without this option.
ALLOW_ROOT := $(if $(filter 0,$(shell id -u)),--allow-root)

# A newcomer should first see the start page, as text with links, and no questions about news or about updates of pinned
# packages. These are defaults that JupyterLab's own settings override.
lab: export JUPYTER_CONFIG_PATH := $(CURDIR)/shared/jupyter$(if $(JUPYTER_CONFIG_PATH),:$(JUPYTER_CONFIG_PATH))
# Whoever reads the course needs only the packages that its notebooks import.
lab doctor finish: export COURSE_STUDENT := 1
# Its kernels know %%ranks from the start.
lab: export JUPYTER_PATH := $(CURDIR)/shared/jupyter$(if $(JUPYTER_PATH),:$(JUPYTER_PATH))

.DEFAULT_GOAL := help
.PHONY: help lab finish update doctor test quick gpu mutants notebooks site slides colab chapter bench release grade gradescope clean python

help: ## List these commands
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' Makefile

lab: python ## Open the course in JupyterLab
	@$(COURSE_PYTHON) -m jupyterlab --ServerApp.root_dir=. $(ALLOW_ROOT) $(LAB_ARGS) $(OPEN_START_PAGE)

doctor: python ## Say whether the course can run here, and what to do if not
	@$(COURSE_PYTHON) -m shared.ranks.machine

finish: python ## Write what you have built as a page that you can keep: mine/finished.html
	@$(COURSE_PYTHON) -m shared.progress

update: ## Take a newer version of the course, and keep what you have written
	@$(PYTHON) update.py

test: python ## Run the checks: lint, unit tests, all lessons (ALL=1: everything)
	@$(if $(ALL),COURSE_EXTRAS=site )$(COURSE_PYTHON) -m tests.run $(PHASES) $(if $(ALL),--all) $(if $(CHAPTER),--chapter "$(CHAPTER)") $(if $(LAST_FAILED),--last-failed)

quick: python ## Run the quick checks: lint, fast unit tests, two notebooks
	@$(COURSE_PYTHON) -m tests.run --quick

mutants: python ## Report how many wrong solutions each check catches, by chapter
	@$(COURSE_PYTHON) -m tests.mutation_report

gpu: python ## Run tests and measurements that need GPUs, and write a report into build/gpu/
	@$(COURSE_PYTHON) -m tests.gpu $(GPU_ARGS)

notebooks: python ## Rebuild the notebooks, the glossary and the start page from source/
	@$(COURSE_PYTHON) -m instructor.build
	@$(COURSE_PYTHON) -m instructor.glossary
	@$(COURSE_PYTHON) -m instructor.start_page

site: python ## Write the course as web pages into build/site/
	@COURSE_EXTRAS=site $(COURSE_PYTHON) -m instructor.site $(SITE_ARGS)

slides: python ## CHAPTER=04: write a lesson's slides into build/slides/
	@COURSE_EXTRAS=site $(COURSE_PYTHON) -m instructor.slides $(CHAPTER)

colab: python ## Write the lessons and labs for Colab into build/colab/
	@$(COURSE_PYTHON) -m instructor.colab

chapter: python ## NAME=13_tensor_parallel TITLE="Tensor parallelism": create a chapter with all the files that it needs
	@$(COURSE_PYTHON) -m instructor.new_chapter "$(NAME)" "$(TITLE)" $(if $(MODULE),--module "$(MODULE)")

bench: python ## Measure start-up, instruments, collectives and training steps on this machine
	@$(COURSE_PYTHON) -m benchmarks.ranks
	@$(COURSE_PYTHON) -m benchmarks.instruments
	@$(COURSE_PYTHON) -m benchmarks.collectives
	@$(COURSE_PYTHON) -m benchmarks.ladder
	@$(COURSE_PYTHON) -m benchmarks.stages

release: python ## CHAPTER=04: write the students' bundle of a chapter into build/release/
	@$(COURSE_PYTHON) -m instructor.release $(CHAPTER)

grade: python ## SUBMISSIONS=dir [CHAPTER=04]: grade students' notebooks into build/grades/
	@$(COURSE_PYTHON) -m instructor.grade "$(SUBMISSIONS)" $(if $(CHAPTER),--chapter $(CHAPTER)) $(GRADE_ARGS)

gradescope: python ## CHAPTER=02: write a lab's autograder for Gradescope into build/gradescope/
	@$(COURSE_PYTHON) -m instructor.grade.gradescope $(CHAPTER)

clean: ## Remove .venv, caches and what was built, except grades
	rm -rf .venv .pytest_cache .ruff_cache *.egg-info
	[ ! -d build ] || find build -mindepth 1 -maxdepth 1 ! -name grades -exec rm -rf {} +
	rmdir build 2>/dev/null || true
	find . -name .git -prune -o -type d \( -name __pycache__ -o -name .ipynb_checkpoints \) -prune -exec rm -rf {} +

python:
	@command -v $(PYTHON) >/dev/null || { echo "The course needs Python 3.11 to 3.14, but there is no $(PYTHON) here."; exit 1; }
