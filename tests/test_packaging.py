"""What is installed, what importing it does, and which files must agree."""

import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from helpers import ROOT, copy_sources
from transformers.utils.import_utils import KERNELS_MIN_VERSION

from hf_ddtree import embedded
from hf_ddtree.testing import tiny_model

IMPORT_EVERYTHING = """
import importlib, pkgutil, socket, sys

def refuse(*args, **kwargs):
    raise AssertionError("importing touches the network")

socket.socket.connect = socket.getaddrinfo = refuse
sys.modules["triton"] = None  # as if it were not installed. Where it is installed, torch imports it.
import hf_ddtree

for module in pkgutil.walk_packages(hf_ddtree.__path__, "hf_ddtree."):
    if module.name != "hf_ddtree.kernels.tree_attention":  # It needs Triton. Only a GPU with Triton imports it.
        importlib.import_module(module.name)
print(hf_ddtree.__file__)
print(*sys.modules)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Return a folder into which the package was installed."""
    sources, target = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("target")
    copy_sources(sources)
    offline = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--disable-pip-version-check"]
    subprocess.run([sys.executable, "-m", "pip", "install", *offline, "--target", target, sources], check=True)
    return target


def test_install_holds_every_module_and_data_file(installed):
    expected = {path.relative_to(ROOT) for path in (ROOT / "hf_ddtree").rglob("*.py")}
    expected |= {Path("hf_ddtree/kernels", path.name) for path in (ROOT / "kernels").glob("*.py")}
    assert {path.relative_to(installed) for path in (installed / "hf_ddtree").rglob("*.py")} == expected
    data = [path.relative_to(ROOT) for path in (ROOT / "hf_ddtree").glob("*/*.json*")]
    data += [path.with_name("model.safetensors") for path in data if path.name == "config.json"]
    assert len(data) > 2 and [path for path in data if not (installed / path).is_file()] == []
    assert sorted(path.name for path in installed.iterdir() if path.suffix != ".dist-info") == ["bin", "hf_ddtree"]
    assert [path.name for path in (installed / "bin").iterdir()] == ["ddtree-benchmark"]


def test_build_sdist_packs_every_tracked_file(tmp_path):
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("needs a git clone, to know what is tracked")
    files = [file for file in tracked.stdout.splitlines() if (ROOT / file).is_file()]
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    build = "from setuptools import build_meta; build_meta.build_sdist('dist')"
    subprocess.run([sys.executable, "-c", build], cwd=tmp_path, check=True, capture_output=True)
    with tarfile.open(next((tmp_path / "dist").iterdir())) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    assert [file for file in files if file not in packed and not file.startswith(".")] == []


def test_import_needs_no_network_and_no_optional_package(installed, tmp_path):
    optional = ["gradio", "gguf", "xgrammar", "peft", "matplotlib"]
    for name in optional:  # where one is not installed, a stand-in shows that it was imported
        (tmp_path / f"{name}.py").touch()
    path = os.pathsep.join([str(installed), str(tmp_path)])
    result = subprocess.run(
        [sys.executable, "-c", IMPORT_EVERYTHING],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    file, modules = result.stdout.splitlines()[-2:]
    assert Path(file).is_relative_to(installed)
    assert {"hf_ddtree.drafters.dflash", "hf_ddtree.kernels.reference"} <= set(modules.split())
    assert not set(optional) & set(modules.split())


LOAD_A_MODEL = """
import importlib.util
from transformers import AutoModelForCausalLM
from transformers.utils import is_kernels_available
import hf_ddtree.kernels.reference

hf_ddtree.enable(AutoModelForCausalLM.from_pretrained(model))
spec = importlib.util.find_spec("kernels")
print(is_kernels_available(), spec and spec.origin)
"""


STAND_IN = """
class Anything:
    def __init__(self, *args, **kwargs):
        pass

    def __call__(self, decorated):
        return decorated

def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return Anything
"""


@pytest.mark.parametrize("hub_kernels", [False, True], ids=["without", "with"])
def test_enable_does_not_hide_the_package_kernels_by_the_folder(hub_kernels, tmp_path):
    """transformers looks for a package of the name that a folder in the root of the repository has."""
    tiny_model("llama").save_pretrained(tmp_path / "model")
    origin = "None"
    if hub_kernels:  # a stand-in, as pip would lay it out
        package = tmp_path / "site" / "kernels"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(STAND_IN)
        metadata = tmp_path / "site" / f"kernels-{KERNELS_MIN_VERSION}.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: kernels\nVersion: {KERNELS_MIN_VERSION}\n")
        origin = str(package / "__init__.py")
    result = subprocess.run(
        [sys.executable, "-c", f"model = {str(tmp_path / 'model')!r}\n{LOAD_A_MODEL}"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == [str(hub_kernels), origin]


def test_install_package_names_the_tested_version():
    requirement = embedded.INSTALL_PACKAGE.split()[-1]
    assert requirement in (ROOT / "constraints.txt").read_text().splitlines()


def test_ci_script_is_executable():
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_quickstart_prints_that_the_texts_are_equal(capsys):
    quickstart = runpy.run_path(str(ROOT / "examples" / "quickstart.py"))
    assert quickstart["main"]() == 0
    assert re.search(r"texts equal +True", capsys.readouterr().out)
