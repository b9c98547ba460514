# Set-up and first run on a fresh machine. README.md shows the plain commands.
#
#   make demo    make .venv, install, train and evaluate the tiny model, write its report
#   make test    make .venv, install, run the tests

PYTHON ?= python3
VENV ?= .venv
# README.md gives times of one thread.
export OMP_NUM_THREADS ?= 1

run = $(VENV)/bin/python
pip = $(run) -m pip install

.PHONY: demo test

# A demo that was stopped continues; one that is done is shown again.
demo: $(VENV)/installed
	$(run) sgsd.py --preset tiny
	$(run) eval.py tiny/model runs/tiny/checkpoints/step_000030 --data tiny/test.jsonl \
		--samples 4 --no-thinking --max-new-tokens 96 --device cpu --rows 160
	$(run) -m extras.compare runs/tiny
	$(run) -m extras.report runs/tiny

test: $(VENV)/installed-tests
	$(run) -m pytest

$(VENV)/installed: requirements.txt
	$(PYTHON) -m venv $(VENV)
	$(pip) -r requirements.txt
	touch $@

$(VENV)/installed-tests: $(VENV)/installed tests/requirements.txt
	$(pip) -r tests/requirements.txt
	touch $@
