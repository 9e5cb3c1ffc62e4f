"""Importing the measuring scripts."""

import importlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
from helpers import ROOT

FOLDER = ROOT / "examples" / "measure"


@pytest.fixture
def script(monkeypatch) -> Iterator[Callable[[str], ModuleType]]:
    """A function that imports a script of examples/measure by its name, as Python does when the script is run.

    Some names, such as "sampling", are also those of other folders on the path. The modules are therefore forgotten
    after the test.
    """
    names = [path.stem for path in FOLDER.glob("*.py")]
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module
    for name in names:
        sys.modules.pop(name, None)
