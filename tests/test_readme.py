"""The commands and snippets on the README and the other pages work, and their links lead somewhere.

The blocks of the README run on tiny models, with options that shorten them. Every other command is parsed, and its
files exist.
"""

import inspect
import re
import runpy
import shlex
import subprocess
import sys
from argparse import ArgumentParser
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from helpers import ROOT, char_tokenizer, copy_sources

from hf_ddtree.benchmark.exactness import gap_below
from hf_ddtree.checks import check_settings
from hf_ddtree.testing import tiny_dflash_drafter, tiny_model

README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md")), ROOT / "kernels" / "README.md"]
TEXTS = {page: page.read_text(encoding="utf-8") for page in PAGES}
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = r"(?:make|pip|python|ddtree-benchmark) [^`]+?"

CHAT_TEMPLATE = "{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<s>{% endif %}"
PLACEHOLDERS = {"MODEL": "target", "DRAFTER": "published", "PREFIX": "results", "ID": "3"}
MAX_ULPS = 4  # of a token chosen in bf16 below the maximum. A wrong token is a hundred below.
# options to append, so that a command takes a moment
SHORTER = {
    "python -m hf_ddtree.training generate": "--shards 2 --shard-size 8 --batch-size 16 --max-new-tokens 8",
    "python -m hf_ddtree.training train": "--steps 2 --evaluate-every 2 --batch-size 4 --anchors 4 --block-size 3 "
    "--num-layers 1 --layer-ids 0 2 --held-out 4 --frequent 0 --negatives 0",
    "python -m hf_ddtree.training evaluate": "--budgets 0 4 --max-new-tokens 4",
    "ddtree-benchmark": "--limit 2 --tree-budgets 4 --temperatures 0 --max-new-tokens 4",
    "python examples/measure/exactness.py": "--prompts 1 --drafters prompt_lookup --budgets 4 --max-new-tokens 4",
    "python examples/measure/sampling.py": "--samples 20 --seeds 1",
    # Without "auto", which would measure and store costs on a machine that is busy with tests.
    "python examples/measure/pausing.py": "--limit 1 --tree-budgets 4 --temperatures 0 --max-new-tokens 4",
}


def blocks(page: Path, language: str) -> list[str]:
    """Return the fenced blocks of a page in a language."""
    return [text for name, text in FENCED.findall(TEXTS[page]) if name == language]


def lines(block: str) -> list[str]:
    """Return the commands of a fenced block, without comments."""
    return [shlex.join(shlex.split(line, comments=True)) for line in block.replace("\\\n", " ").splitlines()]


def commands(page: Path) -> list[str]:
    """Return the commands in the fenced blocks of a page, in its indented lines, and in its text."""
    unfenced = FENCED.sub("", TEXTS[page]).replace("\\\n", " ")
    fenced = [command for block in blocks(page, "sh") for command in lines(block)]
    indented = re.findall(rf"^ {{4}}({COMMAND})$", unfenced, re.MULTILINE)
    return fenced + indented + re.findall(rf"(?<!`)`({COMMAND})`(?!`)", unfenced)


COMMANDS = sorted({command for page in PAGES for command in commands(page)})


@pytest.fixture(autouse=True)
def processes_of_their_own():
    """Reset accelerate, which fixes settings once per process: these commands share one with other tests."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def clone(small_clone, monkeypatch):
    """Change into a clone with a small target and drafter in it, and return it."""
    monkeypatch.chdir(small_clone)
    return small_clone


@pytest.fixture(scope="module")
def small_clone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clone")
    copy_sources(folder)
    target, tokenizer = tiny_model("qwen3"), char_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    for part in (target, tokenizer):
        part.save_pretrained(folder / "target")
    tiny_dflash_drafter(target).save_pretrained(folder / "published")
    return folder


def run(command: str, monkeypatch, more: str = "") -> None:
    """Run a command of a page in this process. make and pip only say what they would do."""
    program, *arguments = [PLACEHOLDERS.get(word, word) for word in shlex.split(f"{command} {more}")]
    if program == "make":
        plan = subprocess.run(["make", "-n", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout
        scripts = re.findall(r"\S+\.(?:py|sh)\b", plan)
        assert [script for script in scripts if not (ROOT / script).is_file()] == []
    elif program == "pip":
        options = ["--dry-run", "--no-index", "--no-build-isolation", "--disable-pip-version-check"]
        pip = [sys.executable, "-m", "pip", *arguments, *options]
        messages = subprocess.run(pip, check=True, capture_output=True, text=True).stderr
        assert "does not provide the extra" not in messages
    elif program == "ddtree-benchmark":  # the console script, which is this module's `main`
        run_python(["-m", "hf_ddtree.benchmark", *arguments], monkeypatch)
    else:
        assert program == "python", f"nothing here knows how to run {command!r}"
        run_python(arguments, monkeypatch)


def run_python(arguments: list[str], monkeypatch) -> None:
    """Do what `python` does with these arguments."""
    is_module = arguments[0] == "-m"
    name, *rest = arguments[1:] if is_module else arguments
    monkeypatch.setattr(sys, "argv", [name, *rest])
    try:
        if is_module:
            runpy.run_module(name, run_name="__main__")
        else:
            monkeypatch.syspath_prepend(str((ROOT / name).parent))
            runpy.run_path(str(ROOT / name), run_name="__main__")
    except SystemExit as end:
        assert not end.code


@pytest.mark.parametrize("block", blocks(README, "sh"))
def test_readme_commands_run(block, clone, monkeypatch):
    for command in lines(block):
        shorter = [more for start, more in SHORTER.items() if command.startswith(start)]
        run(command, monkeypatch, *shorter)
        for output in re.findall(r"--output (\S+)", command):
            assert list(clone.glob(f"{PLACEHOLDERS.get(output, output)}*")) != []


@pytest.mark.parametrize("command", [command for command in SHORTER if "examples/" in command])
def test_commands_with_scripts_run(command, monkeypatch):
    assert any(typed.startswith(command) for typed in COMMANDS)
    run(command, monkeypatch, SHORTER[command])


class Understood(Exception):
    """The options of a command were parsed."""


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_are_understood(command, clone, monkeypatch):
    """No program starts. Of scripts without options, the file exists."""
    parse_args = ArgumentParser.parse_args

    def parse_and_stop(*args, **kwargs):
        parse_args(*args, **kwargs)
        raise Understood

    words = shlex.split(command)
    script = ROOT / words[1]
    if script.suffix == ".py" and "ArgumentParser" not in script.read_text():
        return
    if words[1] == "app.py":
        pytest.importorskip("gradio", reason="needs gradio, which `make test` installs")
    with monkeypatch.context() as patch:
        patch.setattr(ArgumentParser, "parse_args", parse_and_stop)
        if words[0] in ("make", "pip"):
            run(command, patch)
        else:
            with pytest.raises(Understood):
                run(command, patch)


@pytest.mark.parametrize(
    "command",
    [
        "make test",  # in a fenced block, with a comment
        "python app.py --port 8000",
        "python tests/compile_kernels.py",  # in the text
        "python -m hf_ddtree.benchmark",
        "python examples/measure/attention_speed.py --device cpu --repeats 12",  # in an indented line
    ],
)
def test_commands_finds_them_wherever_they_stand(command):
    assert command in COMMANDS


def test_commands_joins_several_lines():
    assert any(command.endswith("--initial first --learning-rate 1.5e-3 --seed 1") for command in COMMANDS)


def replace(source: str, replacements: dict[str, str]) -> str:
    """Return the source after all replacements."""
    for old, new in replacements.items():
        assert old in source
        source = source.replace(old, new)
    return source


def execute(source: str, folder: Path) -> dict:
    """Run a snippet, and return its variables."""
    file = folder / "snippet.py"
    file.write_text(source, encoding="utf-8")
    return runpy.run_path(str(file))


@pytest.mark.parametrize("snippet", blocks(README, "python"))
def test_readme_snippet_prints_the_text_of_plain_generate(snippet, clone, tmp_path, capsys):
    """In fp32 the texts are equal. As written, in bf16, near-ties may fall the other way."""
    names = {"Qwen/Qwen3-4B": "target", "z-lab/Qwen3-4B-DFlash-b16": "published", '"cuda"': '"cpu"'}
    as_written = replace(snippet, names)
    exact = replace(as_written, {"torch.bfloat16": "torch.float32"})
    plain = replace(exact, {"assistant_model=drafter, tree_budget=64, ": ""})
    question = "<s>How many divisors does 196 have?</s><s>"
    execute(plain, tmp_path)
    text = capsys.readouterr().out
    assert text.startswith(question)
    execute(exact, tmp_path)
    assert capsys.readouterr().out == text

    variables = execute(as_written, tmp_path)
    assert capsys.readouterr().out.startswith(question)
    tokens, n_prompt = variables["output"], variables["inputs"]["input_ids"].shape[1]
    assert tokens.shape == (1, n_prompt + 256)
    logits = variables["model"](tokens).logits[0, n_prompt - 1 : -1].detach()
    choices = zip(logits, tokens[0, n_prompt:], strict=True)
    assert all(gap_below(*choice, torch.bfloat16)[1] <= MAX_ULPS for choice in choices)


def test_readme_has_no_block_that_is_not_run():
    assert {language for language, _ in FENCED.findall(TEXTS[README])} == {"python", "sh"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    prose = re.sub(r"`[^`]*`", "", FENCED.sub("", TEXTS[page]))
    for link in re.findall(r"\]\(([^)]+)\)", prose):
        path, _, anchor = link.partition("#")
        if "://" in path:
            continue
        linked = page.parent / path if path else page
        assert linked.exists(), link
        assert linked.suffix != ".png" or linked.stat().st_size < 200_000, link
        assert not anchor or anchor in anchors(linked), link


def anchors(page: Path) -> list[str]:
    """Return the anchors that GitHub gives the headings of a page."""
    titles = re.findall(r"^#+ (.*)$", FENCED.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]


def test_targets_page_lists_every_refused_setting():
    names = re.findall(r'^        "(\w+)": \(', inspect.getsource(check_settings), re.MULTILINE)
    assert len(names) > 12, "the search still finds the settings"
    page = (ROOT / "docs" / "targets.md").read_text(encoding="utf-8")
    assert [name for name in names if name not in page] == []
