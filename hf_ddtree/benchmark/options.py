"""The command line of the benchmark."""

import argparse
from importlib.util import find_spec
from pathlib import Path

from ..messages import quoted
from ..request import MAX_TREE_BUDGET

PROMPTS = Path(__file__).with_name("prompts.jsonl")
DEFAULT_TREE_BUDGETS: list[int | str] = [16, 32, 64, 128, 256, 512, 1024, "auto"]
DEFAULT_TEMPERATURES = [0.0, 1.0]
DESCRIPTION = """Measure the speed, acceptance and exactness of tree decoding on this machine, beside plain generate and
transformers' own assisted generation. The methods take turns on every prompt. A speedup is the median over prompts of
the ratio of tokens per second, prefill included, with a 95% bootstrap interval. In fp32 the exit status is 1 if a
greedy text differs from plain generate's. docs/benchmark.md explains the tables and the plots."""


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the checked options.

    Args:
        arguments: the command line without the program's name. None means `sys.argv[1:]`.

    Raises:
        SystemExit: for options that cannot work. The message on stderr names the option.
    """
    parser = argparse.ArgumentParser(prog="python -m hf_ddtree.benchmark", description=DESCRIPTION)
    parser.add_argument("--model", default="embedded", help="the target: a path, a Hub id, or 'embedded' (the default)")
    parser.add_argument(
        "--assistant-model",
        help="the drafter: a path or a Hub id. By default the embedded model has its own drafter, and every other "
        "model drafts by prompt look-up",
    )
    parser.add_argument(
        "--prompts", default=str(PROMPTS), help="JSONL file or dataset id (default: 48 built-in prompts of 8 kinds)"
    )
    parser.add_argument("--limit", type=int, help="use only this many prompts, the first ones")
    parser.add_argument(
        "--tree-budgets",
        type=_tree_budgets,
        default=DEFAULT_TREE_BUDGETS,
        help="drafted nodes per round, a list separated by commas. 'auto' lets the budget decide in every round "
        f"(default: {_joined(DEFAULT_TREE_BUDGETS)})",
    )
    parser.add_argument(
        "--temperatures",
        type=_temperatures,
        default=DEFAULT_TEMPERATURES,
        help="sampling temperatures, a list separated by commas. 0 means greedy decoding (default: 0,1)",
    )
    parser.add_argument("--max-new-tokens", type=int, default=128, help="tokens per answer (default: 128)")
    parser.add_argument(
        "--dtype",
        default="bfloat16",
        choices=["float32", "bfloat16", "float16"],
        help="dtype of target and drafter (default: bfloat16)",
    )
    parser.add_argument("--threads", type=int, help="CPU threads of this process. PyTorch chooses by default")
    parser.add_argument("--output", metavar="PREFIX", help="write PREFIX.jsonl with all rows, and plots PREFIX-*.png")
    options = parser.parse_args(arguments)
    if options.output is not None and find_spec("matplotlib") is None:
        parser.error("--output draws plots, and matplotlib is not installed. Install it: pip install matplotlib")
    return options


def _joined(values: list[int | str]) -> str:
    return ",".join(map(str, values))


def _tree_budgets(text: str) -> list[int | str]:
    """Return a list of budgets, as an argparse type."""
    try:
        budgets = [part if part == "auto" else int(part) for part in text.split(",")]
    except ValueError:
        budgets = [0]
    if not all(budget == "auto" or 1 <= int(budget) <= MAX_TREE_BUDGET for budget in budgets):
        raise argparse.ArgumentTypeError(
            f"{quoted(text)} is not a list of budgets. Pass numbers from 1 to {MAX_TREE_BUDGET} or 'auto', such as "
            "16,64,auto"
        )
    return budgets


def _temperatures(text: str) -> list[float]:
    """Return a list of temperatures, as an argparse type."""
    try:
        temperatures = [float(part) for part in text.split(",")]
    except ValueError:
        temperatures = [-1.0]
    if not all(temperature >= 0 for temperature in temperatures):
        raise argparse.ArgumentTypeError(
            f"{quoted(text)} is not a list of temperatures. Pass numbers of at least 0, such as 0,0.7,1"
        )
    return temperatures
