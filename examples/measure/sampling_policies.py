"""Which sampling policy accepts most? Print a Markdown table of tokens per round, and one JSON line.

    python examples/measure/sampling_policies.py

Every policy samples from the target's distribution. They differ in how many drafted tokens the target accepts. The
table has, per temperature and tree budget, the tokens per round pooled over the prompts, with a 95% bootstrap interval
over prompts. It is measured in bf16 on the embedded model, and the policies take turns on every prompt.
"""

import argparse
import itertools
import json
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from prompts import chat_inputs, read_questions
from resumable import Results
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import hf_ddtree
from hf_ddtree.embedded import load_models

N_RESAMPLES = 2000
MAX_POOLED_BUDGET = 32  # larger trees do not enter the pooled gain

# emitted tokens and rounds of each prompt, by temperature, tree budget and policy
Counts = dict[tuple[float, int, str], list[tuple[int, int]]]


def main() -> None:
    """Measure every policy, and print the table and the report."""
    options = parse_options()
    model, tokenizer, drafter = load_models(assistant_model=options.drafter, dtype=torch.bfloat16)
    hf_ddtree.enable(model)
    counts = counts_by_setting(model, tokenizer, drafter, options)
    print(table(counts, options))
    print(json.dumps({**vars(options), "pooled_gain": pooled_gain(counts, options)}))


def parse_options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafter", help="path or Hub id (default: the embedded model's own drafter)")
    parser.add_argument("--policies", nargs="+", default=list(hf_ddtree.POLICIES), help="sampling policies")
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.3, 0.7, 1.0], help="sampling temperatures")
    parser.add_argument("--budgets", nargs="+", type=int, default=[8, 16, 32, 64], help="tree budgets")
    parser.add_argument("--prompts", type=int, default=24, help="use only this many prompts")
    parser.add_argument("--max-new-tokens", type=int, default=96, help="tokens per answer")
    parser.add_argument("--output", help="JSONL file with which a stopped run can be continued")
    return parser.parse_args()


def counts_by_setting(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, drafter: PreTrainedModel, options: argparse.Namespace
) -> Counts:
    """Let every policy answer every prompt in turn, and return the counts of each answer."""
    results, counts = Results(options.output), defaultdict(list)
    settings = list(itertools.product(options.temperatures, options.budgets, options.policies))
    for seed, question in enumerate(tqdm(read_questions()[: options.prompts], unit="prompt")):
        inputs = chat_inputs(tokenizer, question)
        for temperature, budget, policy in settings:
            request = {
                "max_new_tokens": options.max_new_tokens,
                "temperature": temperature,
                "tree_budget": budget,
                "tree_sampling": policy,
            }
            key = (seed, *request.values())
            entry = results.get(key, emitted_and_rounds, model, drafter, inputs, seed, request)
            counts[temperature, budget, policy].append(entry)
    return counts


def emitted_and_rounds(
    model: PreTrainedModel,
    drafter: PreTrainedModel,
    inputs: Mapping[str, torch.Tensor],
    seed: int,
    request: dict[str, Any],
) -> tuple[int, int]:
    """Sample one answer, and return its emitted tokens and its rounds."""
    torch.manual_seed(seed)
    settings = {"do_sample": True, "top_k": 0, "return_dict_in_generate": True, **request}
    output = model.generate(**inputs, assistant_model=drafter, **settings)
    return sum(r.accepted_length + 1 for r in output.rounds), len(output.rounds)


def tokens_per_round(counts: list[tuple[int, int]]) -> str:
    """Return the pooled tokens per round and their interval, as text.

    Args:
        counts: emitted tokens and rounds of each prompt.
    """
    emitted, rounds = np.array(counts).T
    index = np.random.default_rng(0).integers(len(counts), size=(N_RESAMPLES, len(counts)))
    low, high = np.quantile(emitted[index].sum(1) / rounds[index].sum(1), [0.025, 0.975])
    return f"{emitted.sum() / rounds.sum():.2f} ({low:.2f}-{high:.2f})"


def table(counts: Counts, options: argparse.Namespace) -> str:
    """Return a Markdown table with one line per temperature and tree budget, and one column per policy."""
    n_columns = len(options.policies) + 2
    lines = [f"| temperature | budget | {' | '.join(options.policies)} |", "|" + "---|" * n_columns]
    for temperature, budget in itertools.product(options.temperatures, options.budgets):
        cells = [tokens_per_round(counts[temperature, budget, policy]) for policy in options.policies]
        lines.append(f"| {temperature} | {budget} | {' | '.join(cells)} |")
    return "\n".join(lines)


def pooled_gain(counts: Counts, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return, by temperature and policy, the accepted length relative to "target", pooled over the smaller budgets."""
    budgets = [budget for budget in options.budgets if budget <= MAX_POOLED_BUDGET]
    gains: dict[str, dict[str, float]] = {}
    for temperature in options.temperatures if budgets else ():
        accepted = {}
        for policy in options.policies:
            pooled = [entry for budget in budgets for entry in counts[temperature, budget, policy]]
            emitted, rounds = np.array(pooled).sum(0)
            accepted[policy] = emitted / rounds - 1
        baseline = accepted.get("target", np.nan)
        gains[str(temperature)] = {policy: round(value / baseline, 3) for policy, value in accepted.items()}
    return gains


if __name__ == "__main__":
    main()
