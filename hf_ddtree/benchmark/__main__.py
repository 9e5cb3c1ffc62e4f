"""Command line: `python -m hf_ddtree.benchmark`, also under `accelerate launch`."""

import argparse
import json
import platform
import sys
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path

import accelerate
import torch
import transformers
from accelerate import PartialState
from accelerate.utils import gather_object
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import hf_ddtree

from ..cost import cpu_name
from ..drafters import load_drafter
from ..embedded import load_embedded
from ..generate import enable
from ..training.prompts import read_prompts
from .methods import methods
from .plots import save_plots
from .report import baseline_table, kind_table, stage_table, table
from .run import RowFile, measure_prompts, warm_up
from .verify_cost import cost_table, save_cost_plot, target_cost

PROMPTS = Path(__file__).with_name("prompts.jsonl")
TREE_BUDGETS = [16, 32, 64, 128, 256, 512, 1024, "auto"]
LONGEST_WAIT = timedelta(days=7)  # of a process that has finished its prompts for the others
DESCRIPTION = """Speed, acceptance and exactness of tree decoding on this machine, beside plain generate and
transformers' own assisted generation. The methods take turns prompt by prompt; speedups are medians of per-prompt
ratios of tokens per second, prefill included, with 95% bootstrap intervals. In fp32 the exit status is 1 if a greedy
text differs from plain generate's. docs/benchmark.md explains the tables and plots."""


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark: measure, print the tables, write the plots."""
    args = parse(arguments)
    prompts = list(enumerate(read_prompts(args.prompts)[: args.limit]))
    # before anything else of torch, because it gives this process its device; without `cpu` CPU processes would not find each other
    state = PartialState(cpu=not torch.accelerator.is_available(), timeout=LONGEST_WAIT)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    target, tokenizer, drafter = load(args, state.device)
    enable(target)
    compared = methods(target, drafter, args.tree_budgets)
    setting = {
        **environment(target, state),
        "assistant_model": args.assistant_model,
        "max_new_tokens": args.max_new_tokens,
    }
    file = None if args.output is None else RowFile(f"{args.output}.jsonl")
    if file is not None and state.is_main_process:
        file.clear()
    warm_up(target, compared)
    state.wait_for_everyone()

    rows: list[dict] = []
    try:
        with state.split_between_processes(prompts) as mine:
            for new in measure_prompts(target, tokenizer, mine, compared, args.temperatures, args.max_new_tokens):
                new = [{**row, **setting} for row in new]
                rows += new
                if file is not None:
                    file.append(new)
        rows = gather_object(rows)
        interrupted = False
    except KeyboardInterrupt:
        interrupted = True
    if not state.is_main_process:
        return
    if file is not None and state.num_processes > 1 and not interrupted:
        file.clear()  # the processes' lines are mixed in it
        file.append(rows)
    report(rows, args.output)
    if "auto" in args.tree_budgets:
        report_cost(target, args.output)
    print(json.dumps(setting))
    if interrupted:
        sys.exit("interrupted: this is what was finished")
    differing = [row for row in rows if row.get("differs_at") is not None]
    if target.dtype == torch.float32 and differing:
        sys.exit(f"{len(differing)} fp32 texts differ from plain generate's: {differing[0]}")


def report(rows: list[dict], output: str | None) -> None:
    """Print the tables and write the plots of the rows there are."""
    print("\n".join(make(rows) for make in (table, baseline_table, kind_table, stage_table)))
    if output is not None:
        print("\n".join(save_plots(rows, output)))


def report_cost(target: PreTrainedModel, output: str | None) -> None:
    """Print and draw what the automatic budget believes verification to cost."""
    cost = target_cost(target)
    print(cost_table(cost))
    if output is not None:
        save_cost_plot(cost, f"{output}-verify_cost.png")
        print(f"{output}-verify_cost.png")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options, checked."""
    parser = argparse.ArgumentParser(prog="python -m hf_ddtree.benchmark", description=DESCRIPTION)
    parser.add_argument("--model", default="embedded", help="the target: path, Hub id, or 'embedded'")
    parser.add_argument("--assistant-model", help="the drafter: path or Hub id; default: the embedded model's own")
    parser.add_argument("--prompts", default=str(PROMPTS), help="JSONL file or dataset id")
    parser.add_argument("--limit", type=int, help="only the first so many prompts")
    parser.add_argument("--tree-budgets", type=numbers(budget), default=TREE_BUDGETS)
    parser.add_argument("--temperatures", type=numbers(float), default=[0.0, 1.0])
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--threads", type=int, help="CPU threads")
    parser.add_argument("--output", help="prefix of the files with the results: PREFIX.jsonl and plots")
    args = parser.parse_args(arguments)
    if args.output is not None and find_spec("matplotlib") is None:
        parser.error("--output draws plots with matplotlib: pip install matplotlib")
    if any(number != "auto" and number < 1 for number in args.tree_budgets):
        parser.error(f"--tree-budgets {args.tree_budgets}: a budget is at least 1.")
    if min(args.temperatures) < 0:
        parser.error(f"--temperatures {args.temperatures}: a temperature is at least 0.")
    return args


def budget(text: str) -> int | str:
    """A number of nodes, or "auto"."""
    return text if text == "auto" else int(text)


def numbers(kind):
    """A list separated by commas, as an argparse type."""

    def convert(text: str) -> list:
        return [kind(part) for part in text.split(",")]

    return convert


def load(args: argparse.Namespace, device: torch.device):
    """Target, tokenizer and drafter (None: prompt look-up), on the device."""
    dtype = getattr(torch, args.dtype)
    if args.model == "embedded":
        target, tokenizer, drafter = load_embedded(dtype)
    else:
        target = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype)
        tokenizer, drafter = AutoTokenizer.from_pretrained(args.model), None
    if args.assistant_model is not None:
        drafter = load_drafter(args.assistant_model, dtype=dtype)
    return target.to(device), tokenizer, None if drafter is None else drafter.to(device)


def environment(target: PreTrainedModel, state: PartialState) -> dict:
    """What the figures were measured on."""
    on_gpu = target.device.type == "cuda"
    return {
        "model": target.config.name_or_path,
        "dtype": str(target.dtype).removeprefix("torch."),
        "attention": target.config._attn_implementation,
        "device": torch.cuda.get_device_name(target.device) if on_gpu else cpu_name(),
        "threads": torch.get_num_threads(),
        "processes": state.num_processes,
        "python": platform.python_version(),
        "hf_ddtree": hf_ddtree.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "accelerate": accelerate.__version__,
    }


if __name__ == "__main__":
    main()
