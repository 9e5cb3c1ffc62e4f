"""What is installed, what importing it does, and what the README tells people to type."""

import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hf_ddtree import embedded
from hf_ddtree.testing import FAMILIES

ROOT = Path(__file__).parent.parent

IMPORT_EVERYTHING = """
import importlib, pkgutil, socket, sys

def refuse(*args, **kwargs):
    raise AssertionError("importing touches the network")

socket.socket.connect = socket.getaddrinfo = refuse
sys.modules["triton"] = None  # as if it were not installed; where it is, torch imports it
import hf_ddtree

for module in pkgutil.walk_packages(hf_ddtree.__path__, "hf_ddtree."):
    importlib.import_module(module.name)
print(hf_ddtree.__file__)
print(*sys.modules)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder the package was installed into, from a copy: a build leaves its files beside the sources."""
    sources, target = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("target")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, sources)
    shutil.copytree(ROOT / "hf_ddtree", sources / "hf_ddtree", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "kernels", sources / "kernels")
    offline = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--disable-pip-version-check"]
    subprocess.run([sys.executable, "-m", "pip", "install", *offline, "--target", target, sources], check=True)
    return target


def test_every_module_is_installed(installed):
    expected = {path.relative_to(ROOT) for path in (ROOT / "hf_ddtree").rglob("*.py")}
    assert {path.relative_to(installed) for path in (installed / "hf_ddtree").rglob("*.py")} == expected
    assert sorted(path.name for path in installed.iterdir() if path.suffix != ".dist-info") == ["hf_ddtree"]


def test_import_touches_no_network_and_no_optional_package(installed, tmp_path):
    optional = ["gradio", "gguf", "xgrammar", "peft"]
    for name in optional:  # where it is not installed, a stand-in shows that it was imported
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
    assert "hf_ddtree.drafters.dflash" in modules.split()
    assert not set(optional) & set(modules.split())


def test_kernels_is_no_package():
    assert (ROOT / "kernels").is_dir()
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_the_commands_of_the_readme_exist():
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    pages = (ROOT / "README.md", ROOT / "docs" / "demo.md")
    commands = re.findall(r"\bmake (\w+)\b", "\n".join(code for page in pages for code in code_of(page)))
    assert {"demo", "app", "test"} <= set(commands) <= targets


def test_the_commands_that_start_the_page_are_understood():
    pytest.importorskip("gradio", reason="needs gradio, which `make test` installs")
    app = runpy.run_path(str(ROOT / "app.py"))
    commands = re.findall(r"^python app\.py(.*?)(?:#.*)?$", (ROOT / "docs" / "demo.md").read_text(), re.MULTILINE)
    assert len(commands) == 2
    for arguments in commands:
        app["parse"](shlex.split(arguments))


def test_the_pictures_of_the_pages_exist():
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for picture in re.findall(r"!\[.*?\]\((.*?)\)", page.read_text()):
            assert (page.parent / picture).stat().st_size < 200_000


def code_of(markdown: Path) -> list[str]:
    text = markdown.read_text()
    return re.findall(r"```.*?```", text, flags=re.DOTALL) + re.findall(r"(?<!`)`[^`\n]+`(?!`)", text)


def test_the_readme_names_every_supported_family():
    readme = (ROOT / "README.md").read_text()
    assert [name for name in FAMILIES if f"`{name}`" not in readme] == []


def test_the_install_command_names_the_tested_version():
    requirement = embedded.INSTALL_PACKAGE.split()[-1]
    assert requirement in (ROOT / "constraints.txt").read_text().splitlines()


def test_ci_can_be_run():
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_quickstart_shows_equal_texts(capsys):
    quickstart = runpy.run_path(str(ROOT / "examples" / "quickstart.py"))
    assert quickstart["main"]() == 0
    assert re.search(r"texts equal +True", capsys.readouterr().out)
