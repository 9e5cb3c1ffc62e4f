"""Which sampling policy accepts most? Prints a Markdown table of tokens per round and one JSON line.

    python examples/sampling_policies.py

Every policy samples from the target's distribution; they differ in how many drafted tokens survive. Per temperature and
budget: tokens per round pooled over the prompts, with a bootstrap interval over prompts (95%), in bf16 on the embedded
model. The policies take turns prompt by prompt.
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
from resumable import Results
from tqdm import tqdm

import hf_ddtree
from hf_ddtree.embedded import load_embedded
from hf_ddtree.tree import POLICIES


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafter", help="path or Hub id; default: the embedded model's own")
    parser.add_argument("--policies", nargs="+", default=list(POLICIES))
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.3, 0.7, 1.0])
    parser.add_argument("--budgets", nargs="+", type=int, default=[8, 16, 32, 64])
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--output", help="JSONL file that lets a long run be stopped and go on")
    args = parser.parse_args()

    model, tokenizer, drafter = load_embedded(dtype=torch.bfloat16)
    hf_ddtree.enable(model)
    if args.drafter is not None:
        drafter = hf_ddtree.load_drafter(args.drafter, dtype=model.dtype)
    rounds = measure(model, tokenizer, drafter, args)
    print(table(rounds, args))
    print(json.dumps({**vars(args), "pooled_gain": pooled_gain(rounds, args)}))


def measure(model, tokenizer, drafter, args) -> dict[tuple, list[tuple[int, int]]]:
    """Per (temperature, budget, policy): emitted tokens and rounds of each prompt."""
    lines = Path(__file__).with_name("prompts.jsonl").read_text(encoding="utf-8").splitlines()
    results, rounds = Results(args.output), defaultdict(list)
    for seed, line in enumerate(tqdm(lines[: args.prompts], unit="prompt")):
        chat = [{"role": "user", "content": json.loads(line)["prompt"]}]
        inputs = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        for temperature in args.temperatures:
            for budget in args.budgets:
                for policy in args.policies:
                    options = {
                        "max_new_tokens": args.max_new_tokens,
                        "temperature": temperature,
                        "tree_budget": budget,
                        "tree_sampling": policy,
                    }
                    key = (seed, *options.values())
                    counts = results.get(key, sample, model, drafter, inputs, seed, options)
                    rounds[temperature, budget, policy].append(counts)
    return rounds


def sample(model, drafter, inputs, seed: int, options: dict) -> tuple[int, int]:
    """Emitted tokens and rounds of one request."""
    torch.manual_seed(seed)
    output = model.generate(
        **inputs, do_sample=True, top_k=0, assistant_model=drafter, return_dict_in_generate=True, **options
    )
    return sum(r.accepted_length + 1 for r in output.rounds), len(output.rounds)


def tokens_per_round(counts: list[tuple[int, int]]) -> str:
    """The pooled ratio and its interval from 2,000 resamples of the prompts."""
    emitted, rounds = np.array(counts).T
    index = np.random.default_rng(0).integers(len(counts), size=(2000, len(counts)))
    low, high = np.quantile(emitted[index].sum(1) / rounds[index].sum(1), [0.025, 0.975])
    return f"{emitted.sum() / rounds.sum():.2f} ({low:.2f}-{high:.2f})"


def table(rounds: dict, args) -> str:
    """Markdown: a row per temperature and budget, a column per policy."""
    lines = [f"| temperature | budget | {' | '.join(args.policies)} |", "|---|" + "---|" * (len(args.policies) + 1)]
    for temperature in args.temperatures:
        for budget in args.budgets:
            cells = [tokens_per_round(rounds[temperature, budget, policy]) for policy in args.policies]
            lines.append(f"| {temperature} | {budget} | {' | '.join(cells)} |")
    return "\n".join(lines)


def pooled_gain(rounds: dict, args) -> dict[str, dict[str, float]]:
    """Accepted drafted tokens per round relative to "target", pooled over budgets up to 32, by temperature."""
    gains = {}
    for temperature in args.temperatures:
        accepted = {}
        for policy in args.policies:
            counts = [c for budget in args.budgets if budget <= 32 for c in rounds[temperature, budget, policy]]
            emitted, n = np.array(counts).sum(0)
            accepted[policy] = emitted / n - 1
        gains[str(temperature)] = {p: round(accepted[p] / accepted.get("target", np.nan), 3) for p in args.policies}
    return gains


if __name__ == "__main__":
    main()
