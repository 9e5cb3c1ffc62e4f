"""How exact is tree decoding on a real model? Compare it with plain generate, and print one JSON line.

    python examples/measure/exactness.py                       # fp32: are all tokens equal, greedy and sampled?
    python examples/measure/exactness.py --dtype bfloat16      # bf16: how far is each token below plain's maximum?

In fp32 every token must be equal, for sampling with the same seed. Otherwise the exit status is 1.

In bf16 a forward over several tokens rounds differently from a forward over one token. Near-ties may therefore flip, in
native assisted generation, too. The script compares each emitted token with plain decoding of the same prefix. The exit
status is 1 if a token lies more than 4 ulps below the maximum.
"""

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from prompts import chat_inputs, read_questions
from resumable import Results
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import hf_ddtree
from hf_ddtree.comparison import first_difference, ulp
from hf_ddtree.testing import tiny_dflash_drafter, truncated_copy

QUESTIONS = read_questions()[:12]
SAMPLING = {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.2}
MODES: dict[str, dict[str, Any]] = {"greedy": {"do_sample": False}, "sampled": SAMPLING}
MAX_ULPS = 4

Drafters = dict[str, PreTrainedModel | None]


def main() -> None:
    """Compare, print the report, and exit with status 1 if the comparison failed."""
    options = parse_options()
    model, tokenizer, _ = hf_ddtree.load_embedded(dtype=getattr(torch, options.dtype))
    hf_ddtree.enable(model)
    drafters = {name: named_drafter(name, model) for name in options.drafters}
    report_of = bfloat16_report if options.dtype == "bfloat16" else float32_report
    start = time.time()
    report, failed = report_of(model, tokenizer, drafters, options)
    print(json.dumps({**vars(options), **report, "seconds": round(time.time() - start)}))
    raise SystemExit(failed)


def parse_options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of all models")
    parser.add_argument(
        "--drafters",
        nargs="+",
        default=["prompt_lookup", "truncated", "random_dflash"],
        help="prompt_lookup, truncated (the target's first 6 layers), random_dflash, or a path or Hub id",
    )
    parser.add_argument("--budgets", nargs="+", type=int, default=[1, 8, 64, 256], help="tree budgets")
    parser.add_argument("--prompts", type=int, default=len(QUESTIONS), help="use only this many prompts")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="tokens per answer")
    parser.add_argument("--output", help="JSONL file with which a stopped run can be continued")
    return parser.parse_args()


def named_drafter(name: str, model: PreTrainedModel) -> PreTrainedModel | None:
    """Return a drafter for the target.

    Args:
        name: "prompt_lookup", "truncated", "random_dflash", or the path or Hub id of a drafter.
        model: the target.
    """
    if name == "prompt_lookup":
        return None
    if name == "truncated":
        return truncated_copy(model, 6)
    if name == "random_dflash":
        config = model.config
        return tiny_dflash_drafter(
            model,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            block_size=16,
            initializer_range=0.02,
        )
    return hf_ddtree.load_drafter(name, dtype=model.dtype)


def new_tokens(model: PreTrainedModel, inputs: Mapping[str, torch.Tensor], seed: int, **settings: Any) -> list[int]:
    """Generate from a fixed global seed, and return the new tokens."""
    torch.manual_seed(seed)
    return model.generate(**inputs, **settings)[0, inputs["input_ids"].shape[1] :].tolist()


def float32_report(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, drafters: Drafters, options: argparse.Namespace
) -> tuple[dict[str, Any], bool]:
    """Return how many texts equal plain generate's per drafter, mode and budget, and whether any text differs."""
    results = Results(options.output)
    equal: dict[str, list[bool]] = defaultdict(list)
    for seed, question in enumerate(tqdm(QUESTIONS[: options.prompts], unit="prompt")):
        inputs = chat_inputs(tokenizer, question)
        for mode, sampling in MODES.items():
            settings = {"max_new_tokens": options.max_new_tokens, **sampling}
            plain_key = (options.max_new_tokens, seed, mode, "plain")
            plain = results.get(plain_key, new_tokens, model, inputs, seed, **settings)
            for name, drafter in drafters.items():
                for budget in options.budgets:
                    tree = {"assistant_model": drafter, "tree_budget": budget, "tree_sampling": "target"}
                    key = (options.max_new_tokens, seed, mode, name, budget)
                    tokens = results.get(key, new_tokens, model, inputs, seed, **tree, **settings)
                    place = first_difference(tokens, plain)
                    equal[f"{name}/{mode}/{budget}"].append(place is None)
                    if place is not None:
                        tqdm.write(f"{key} differs from token {place} on, on {question!r}")
    compared = sum(map(len, equal.values()))
    counts = {name: sum(values) for name, values in equal.items()}
    return {"compared": compared, "equal": counts}, sum(counts.values()) < compared


def bfloat16_report(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, drafters: Drafters, options: argparse.Namespace
) -> tuple[dict[str, Any], bool]:
    """Return, per drafter and budget, how often and how far tokens lie below plain's maximum, and whether too far."""
    results = Results(options.output)
    gaps: dict[str, list[float]] = defaultdict(list)
    runs: dict[str, dict[str, Any]] = {"native prompt look-up": {"prompt_lookup_num_tokens": 10}}
    for name, drafter in drafters.items():
        for budget in options.budgets:
            runs[f"{name}/{budget}"] = {"assistant_model": drafter, "tree_budget": budget}
    for seed, question in enumerate(tqdm(QUESTIONS[: options.prompts], unit="prompt")):
        inputs = chat_inputs(tokenizer, question)
        for name, method in runs.items():
            settings = {"max_new_tokens": options.max_new_tokens, "do_sample": False, **method}
            key = (options.max_new_tokens, seed, "bfloat16", name)
            gaps[name] += results.get(key, teacher_forced_gaps, model, inputs, seed, settings)
    report = {
        name: {
            "tokens": len(values),
            "flip_rate": round(sum(gap > 0 for gap in values) / len(values), 4),
            "max_ulps": max(values),
        }
        for name, values in gaps.items()
    }
    worst = max(entry["max_ulps"] for name, entry in report.items() if not name.startswith("native"))
    return {"teacher_forced": report}, worst > MAX_ULPS


def teacher_forced_gaps(
    model: PreTrainedModel, inputs: Mapping[str, torch.Tensor], seed: int, settings: dict[str, Any]
) -> list[float]:
    """Generate, and return what `gaps_below_maximum` says of the new tokens."""
    return gaps_below_maximum(model, inputs["input_ids"], new_tokens(model, inputs, seed, **settings))


@torch.no_grad()
def gaps_below_maximum(model: PreTrainedModel, prompt: torch.Tensor, tokens: list[int]) -> list[float]:
    """Return, per token, how many ulps its logit lies below the maximum of plain decoding after the same prefix.

    Args:
        model: the target.
        prompt: `[1, S]` int64.
        tokens: the tokens after the prompt.
    """
    outputs = model(prompt, use_cache=True, logits_to_keep=1)
    gaps = []
    for token in tokens:
        logits = outputs.logits[0, -1].float()
        best = float(logits.max())
        gaps.append((best - float(logits[token])) / ulp(best, model.dtype))
        outputs = model(torch.tensor([[token]]), cache=outputs.cache, use_cache=True)
    return gaps


if __name__ == "__main__":
    main()
