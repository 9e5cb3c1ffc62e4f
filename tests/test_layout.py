"""The layout of the package: no import climbs, every module has its test file, and only `enable` reads the settings."""

import ast
from pathlib import Path

import pytest
from helpers import ROOT
from torch.utils._device import _device_constructors  # torch has no public list of them

PACKAGE = ROOT / "hf_ddtree"
# From the ground up. A file imports only from its own floor or from a floor below. "hf_ddtree" is the package itself,
# with the public names.
FLOORS = (
    ("_transformers", "files", "messages", "kernels"),
    ("tree", "comparison"),
    ("sampling",),
    ("build",),
    ("request",),
    ("target",),
    ("budget",),
    ("drafters",),
    ("checks", "adapters"),
    ("walk", "output", "streamer"),
    ("generate",),
    ("enable",),
    ("embedded",),
    ("hf_ddtree",),
    ("testing",),
    ("training",),
    ("benchmark",),
    ("demo",),
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
# Modules whose test file is not test_<module>.py in the same folder of tests/, each with the reason.
TESTED_ELSEWHERE = {
    "_transformers.py": "test_transformers_surface.py",  # It lists what moved in a new release of transformers.
}
# `enable` resolves the settings of a call once. Files below it must not read them, except for the reason given here.
READS_GENERATION_CONFIG = {
    "_transformers.py": "It wraps a private method of the settings and reads no setting.",
}
DESCRIBE_THEMSELVES = ("benchmark", "training")  # The docstrings of these packages describe their files.
MAX_LINES = 300  # of a test file
# Functions of torch that make a tensor in the default dtype or on the default device of the process, unless the call
# names both. Functions that take them from another tensor (`zeros_like`, `new_zeros`, ..) are not among them.
FACTORIES = {
    *("arange", "as_tensor", "asarray", "bartlett_window", "blackman_window", "complex", "empty", "empty_permuted"),
    *("empty_strided", "eye", "fftfreq", "full", "hamming_window", "hann_window", "kaiser_window", "linspace"),
    *("logspace", "nested_tensor", "normal", "ones", "rand", "randint", "randn", "randperm", "range", "rfftfreq"),
    *("scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros"),
}
TENSOR_TYPES = {"Tensor", "BoolTensor", "DoubleTensor", "FloatTensor", "HalfTensor", "IntTensor", "LongTensor"}

MODULES = sorted(path for path in PACKAGE.rglob("*.py") if "__pycache__" not in path.parts)
TEST_FILES = sorted((ROOT / "tests").rglob("test_*.py"))


def room(path: Path) -> str:
    """Return the room of a file: the first part of its path below the package, or the package itself."""
    first = path.relative_to(PACKAGE).parts[0]
    return "hf_ddtree" if first == "__init__.py" else first.removesuffix(".py")


def imported_rooms(path: Path, source: str) -> list[tuple[int, str]]:
    """Return the line and the room of every import from the package, also of those inside functions."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = path.relative_to(ROOT).parts[: -node.level] if node.level else ()
            start = [*package, node.module] if node.module else package
            names = [".".join([*start, alias.name]) for alias in node.names]
        else:
            continue
        parts = [name.split(".") for name in names]
        found += [(node.lineno, room_of_name(part)) for part in parts if part[0] == "hf_ddtree"]
    return found


def room_of_name(parts: list[str]) -> str:
    """Return the room of a dotted name. A name that is no file or folder comes from the package itself."""
    if len(parts) > 1 and ((PACKAGE / parts[1]).is_dir() or (PACKAGE / f"{parts[1]}.py").is_file()):
        return parts[1]
    return "hf_ddtree"


def report(problems: list[str]) -> None:
    """Fail with one problem per line."""
    if problems:
        pytest.fail("\n" + "\n".join(problems), pytrace=False)


def test_floors_name_every_room():
    rooms = {room(path) for path in MODULES}
    new = [f"hf_ddtree/{name} is on no floor: add it to FLOORS." for name in sorted(rooms - set(FLOOR_OF))]
    gone = [f"FLOORS names {name}, which does not exist." for name in sorted(set(FLOOR_OF) - rooms)]
    report(new + gone)


@pytest.mark.parametrize(
    "source",
    [
        "from ..walk import walk_tree",
        "from .. import walk",
        "import hf_ddtree.walk",
        "from hf_ddtree import walk",
        "from hf_ddtree.walk import walk_tree",
        "def f():\n    from ..walk import walk_tree",
    ],
)
def test_imported_rooms_sees_every_form(source):
    path = PACKAGE / "target" / "cache.py"
    assert [name for _, name in imported_rooms(path, source)] == ["walk"]
    assert imported_rooms(path, "import torch\nfrom .masks import f\nimport hf_ddtree") == [
        (2, "target"),
        (3, "hf_ddtree"),
    ]


def test_no_import_climbs():
    climbing = []
    for path in MODULES:
        for line, other in imported_rooms(path, path.read_text(encoding="utf-8")):
            if FLOOR_OF.get(other, len(FLOORS)) > FLOOR_OF.get(room(path), len(FLOORS)):
                climbing.append(f"{path.relative_to(ROOT)}:{line} climbs from {room(path)} to {other}.")
    report(climbing)


def test_every_folder_of_modules_is_a_package():
    folders = sorted({path.parent for path in MODULES})
    report(
        [
            f"{folder.relative_to(ROOT)} has no __init__.py."
            for folder in folders
            if not (folder / "__init__.py").is_file()
        ]
    )


def test_every_module_has_its_test_file():
    missing = []
    for path in MODULES:
        if path.name == "__init__.py":
            continue
        inside = path.relative_to(PACKAGE)
        name = TESTED_ELSEWHERE.get(inside.as_posix(), inside.with_name(f"test_{path.stem.strip('_')}.py"))
        expected = ROOT / "tests" / name
        if not expected.is_file():
            missing.append(f"{path.relative_to(ROOT)} has no {expected.relative_to(ROOT)}.")
    report(missing)


def test_contributing_describes_every_module():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    paths = [path.relative_to(PACKAGE) for path in MODULES if path.name != "__init__.py"]
    listed = [path for path in paths if path.parts[0] not in DESCRIBE_THEMSELVES]
    missing = [
        f"CONTRIBUTING.md has no line about {path}." for path in listed if f"\n    {path.as_posix()} " not in text
    ]
    for room in DESCRIBE_THEMSELVES:
        docstring = ast.get_docstring(ast.parse((PACKAGE / room / "__init__.py").read_text(encoding="utf-8"))) or ""
        names = [path.name for path in paths if path.parts[0] == room and path.name != "__main__.py"]
        missing += [
            f"hf_ddtree/{room}/__init__.py does not describe {name}." for name in names if name not in docstring
        ]
    report(missing)


def test_no_test_file_is_long():
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in TEST_FILES}
    report(
        [
            f"{path.relative_to(ROOT)} has {n} lines, more than {MAX_LINES}."
            for path, n in lengths.items()
            if n > MAX_LINES
        ]
    )


def test_only_enable_reads_the_generation_config():
    reading = []
    for path in MODULES:
        below = FLOOR_OF.get(room(path), len(FLOORS)) < FLOOR_OF["enable"]
        if not below or path.relative_to(PACKAGE).as_posix() in READS_GENERATION_CONFIG:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and ends_in_generation_config(node.value):
                reading.append(f"{path.relative_to(ROOT)}:{node.lineno} reads generation_config.{node.attr}.")
    report(reading)


def ends_in_generation_config(node: ast.expr) -> bool:
    """Return whether an expression is a variable or an attribute of the name `generation_config`."""
    return getattr(node, "id", None) == "generation_config" or getattr(node, "attr", None) == "generation_config"


def unnamed_defaults(source: str) -> list[tuple[int, str]]:
    """Return the line and the text of every call that makes a tensor without naming its dtype and its device."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        module, _, name = ast.unparse(node.func).rpartition(".")
        keywords = {keyword.arg for keyword in node.keywords if ast.unparse(keyword.value) != "None"}
        generator = name == "Generator" and not node.args  # its device is its first argument
        factory = name in FACTORIES and not {"dtype", "device"} <= keywords
        if module.split(".")[0] == "torch" and (factory or generator or name in TENSOR_TYPES):
            found.append((node.lineno, ast.unparse(node)))
    return found


@pytest.mark.parametrize(
    "call, found",
    [
        ("torch.zeros(2, dtype=torch.long, device='cpu')", False),
        ("torch.zeros(2, dtype=torch.long)", True),
        ("torch.arange(2, device=device)", True),
        ("torch.rand(2, dtype=None, device=None)", True),
        ("torch.fft.fftfreq(2)", True),
        ("torch.Generator()", True),
        ("torch.Generator('cpu')", False),
        ("torch.LongTensor([2])", True),
        ("torch.zeros_like(x)", False),
        ("x.new_zeros(2)", False),
        ("np.zeros(2)", False),
    ],
)
def test_unnamed_defaults_sees_every_form(call, found):
    assert bool(unnamed_defaults(f"def f():\n    return g({call})")) == found


def test_factories_cover_what_follows_the_default_device():
    # not the remembered list, which may hold a function that transformers had patched while it loaded a model
    names = {factory.__name__.removeprefix("fft_") for factory in _device_constructors.__wrapped__()}
    unused = {name for name in names if name.startswith("sparse_") or name == "empty_quantized"}
    assert names - unused <= FACTORIES


def test_every_tensor_names_its_dtype_and_its_device():
    """A user may set `torch.set_default_dtype` and `torch.set_default_device`, and no tensor here may follow them."""
    following = []
    for path in [*MODULES, *sorted((ROOT / "kernels").glob("*.py"))]:
        for line, call in unnamed_defaults(path.read_text(encoding="utf-8")):
            following.append(f"{path.relative_to(ROOT)}:{line} names no dtype or no device: {call}.")
    report(following)
