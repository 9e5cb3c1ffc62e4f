"""The notebook runs from top to bottom and shows the results that its text describes."""

import os
import re
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="needs nbformat, which `make test` installs")
nbclient = pytest.importorskip("nbclient", reason="needs nbclient, which `make test` installs")

NOTEBOOK = Path(__file__).parent.parent / "examples" / "tour.ipynb"
TIMEOUT = 300  # seconds for each cell, on a CPU


@pytest.fixture(scope="module")
def outputs():
    """What the executed cells printed, and the MIME types of what they displayed."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=TIMEOUT, kernel_name="python3", resources={"metadata": {"path": str(NOTEBOOK.parent)}}
    )
    client.execute(env={**os.environ, "OMP_NUM_THREADS": "1"})
    shown = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    printed = "".join(output.text for output in shown if output.output_type == "stream" and output.name == "stdout")
    pictures = {kind for output in shown if "data" in output for kind in output.data}
    return printed, pictures


def test_notebook_shows_equal_texts(outputs):
    printed, _ = outputs
    assert re.search(r"texts equal +True", printed)
    assert re.search(r"equals plain +True", printed)
    assert re.search(r"same seed, same text +True", printed)


def test_notebook_shows_json_of_the_schema(outputs):
    printed, _ = outputs
    assert re.search(r"parsed +\{'name': '.*', 'age': \d+\}", printed)


def test_notebook_shows_pictures(outputs):
    _, pictures = outputs
    assert {"image/svg+xml", "image/png"} <= pictures
