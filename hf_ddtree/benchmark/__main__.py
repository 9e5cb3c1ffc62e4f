"""Command line: `python -m hf_ddtree.benchmark`."""

import argparse
import json
import platform
import sys
from pathlib import Path

import torch
import transformers
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from ..drafters import load_drafter
from ..embedded import load_embedded
from ..generate import enable
from ..training.prompts import read_prompts
from .measure import measure_prompt
from .methods import methods
from .report import kind_table, table

PROMPTS = Path(__file__).with_name("prompts.jsonl")
DESCRIPTION = """Speed, acceptance and exactness of tree decoding on this machine, beside plain generate and transformers' own
assisted generation. The methods take turns prompt by prompt; speedups are medians of per-prompt ratios of tokens per second,
prefill included, with 95% bootstrap intervals. In fp32 the exit status is 1 if a greedy text differs from plain generate's."""


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark."""
    args = parse(arguments)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    target, tokenizer, drafter = load(args)
    enable(target)
    compared = methods(target, drafter, args.tree_budgets)
    prompts = read_prompts(args.prompts)[: args.limit]
    for method in compared:  # the first call of each pays for checks and allocations
        target.generate(torch.tensor([[1, 2, 3]]).to(target.device), max_new_tokens=8, **method.arguments())
    rows = []
    for seed, prompt in enumerate(tqdm(prompts, unit="prompt")):
        for temperature in args.temperatures:
            rows += measure_prompt(target, tokenizer, prompt, compared, temperature, args.max_new_tokens, seed)
    if args.output is not None:
        settings = {**environment(target), "assistant_model": args.assistant_model}
        lines = (json.dumps({**row, **settings}) for row in rows)
        Path(f"{args.output}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{table(rows)}\n{kind_table(rows)}\n{json.dumps(environment(target))}")
    differing = [row for row in rows if row.get("differs_at") is not None]
    if target.dtype == torch.float32 and differing:
        sys.exit(f"{len(differing)} fp32 texts differ from plain generate's: {differing[0]}")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options, checked."""
    parser = argparse.ArgumentParser(prog="python -m hf_ddtree.benchmark", description=DESCRIPTION)
    parser.add_argument("--model", default="embedded", help="the target: path, Hub id, or 'embedded'")
    parser.add_argument("--assistant-model", help="the drafter: path or Hub id; default: the embedded model's own")
    parser.add_argument("--prompts", default=str(PROMPTS), help="JSONL file or dataset id")
    parser.add_argument("--limit", type=int, help="only the first so many prompts")
    parser.add_argument("--tree-budgets", type=numbers(int), default=[16, 32, 64, 128, 256, 512, 1024])
    parser.add_argument("--temperatures", type=numbers(float), default=[0.0, 1.0])
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--threads", type=int, help="CPU threads")
    parser.add_argument("--output", help="prefix of the files with the results: PREFIX.jsonl")
    args = parser.parse_args(arguments)
    if min(args.tree_budgets) < 1:
        parser.error(f"--tree-budgets {args.tree_budgets}: a budget is at least 1.")
    if min(args.temperatures) < 0:
        parser.error(f"--temperatures {args.temperatures}: a temperature is at least 0.")
    return args


def numbers(kind: type):
    """A list separated by commas, as an argparse type."""

    def convert(text: str) -> list:
        return [kind(part) for part in text.split(",")]

    return convert


def load(args: argparse.Namespace):
    """Target, tokenizer and drafter (None: prompt look-up)."""
    dtype = getattr(torch, args.dtype)
    if args.model == "embedded":
        target, tokenizer, drafter = load_embedded(dtype)
    else:
        target = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype)
        tokenizer, drafter = AutoTokenizer.from_pretrained(args.model), None
    if torch.accelerator.is_available():
        target = target.to(torch.accelerator.current_accelerator())
    if args.assistant_model is not None:
        drafter = load_drafter(args.assistant_model, dtype=dtype)
    return target, tokenizer, None if drafter is None else drafter.to(target.device)


def environment(target) -> dict:
    """What the figures were measured on."""
    on_gpu = target.device.type == "cuda"
    return {
        "model": target.config.name_or_path,
        "dtype": str(target.dtype).removeprefix("torch."),
        "attention": target.config._attn_implementation,
        "device": torch.cuda.get_device_name(target.device) if on_gpu else platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


if __name__ == "__main__":
    main()
