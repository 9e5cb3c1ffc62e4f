"""How exact is tree decoding on a real model? Compares it with plain `generate` and prints one JSON line.

    python examples/exactness.py                       # fp32: every token equal, greedy and same-seed sampled
    python examples/exactness.py --dtype bfloat16      # bf16: how far each emitted token is from the plain maximum

In fp32 the exit status is 1 if any token differs. In bf16 a forward over several tokens rounds differently from one over
a single token, so near-ties may flip, for native assisted generation too; each emitted token is then compared with plain
decoding of the same prefix, and the exit status is 1 if one is further than 4 ulps below the maximum.
"""

import argparse
import json
import time
from collections import defaultdict
from pathlib import Path

import torch
from resumable import Results
from tqdm import tqdm

import hf_ddtree
from hf_ddtree.embedded import load_embedded
from hf_ddtree.testing import tiny_dflash_drafter, truncated_copy

PROMPTS = [row["prompt"] for row in map(json.loads, Path(__file__).with_name("prompts.jsonl").open())][:12]
SAMPLING = {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.2}
MAX_ULPS = 4


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--drafters", nargs="+", default=["prompt_lookup", "truncated", "random_dflash"])
    parser.add_argument("--budgets", nargs="+", type=int, default=[1, 8, 64, 256])
    parser.add_argument("--prompts", type=int, default=len(PROMPTS))
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--output", help="JSONL file that lets a long run be stopped and go on")
    args = parser.parse_args()

    model, tokenizer, _ = load_embedded(dtype=getattr(torch, args.dtype))
    hf_ddtree.enable(model)
    drafters = {name: load_drafter(name, model) for name in args.drafters}
    check = check_bfloat16 if args.dtype == "bfloat16" else check_float32
    start = time.time()
    report, failed = check(model, tokenizer, drafters, args)
    print(json.dumps({**vars(args), **report, "seconds": round(time.time() - start)}))
    raise SystemExit(failed)


def load_drafter(name: str, model):
    """A drafter by name, or by path or Hub id."""
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


def prompt_ids(tokenizer, prompt: str) -> dict:
    chat = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)


def generate(model, inputs, seed: int, **settings) -> list[int]:
    """The new tokens."""
    torch.manual_seed(seed)
    return model.generate(**inputs, **settings)[0, inputs["input_ids"].shape[1] :].tolist()


def check_float32(model, tokenizer, drafters, args):
    """Count equal outputs per drafter, mode and budget."""
    results, equal = Results(args.output), defaultdict(list)
    for seed, prompt in enumerate(tqdm(PROMPTS[: args.prompts], unit="prompt")):
        inputs = prompt_ids(tokenizer, prompt)
        for mode, sampling in (("greedy", {"do_sample": False}), ("sampled", SAMPLING)):
            settings = {"max_new_tokens": args.max_new_tokens, **sampling}
            plain_key = (args.max_new_tokens, seed, mode, "plain")
            plain = results.get(plain_key, generate, model, inputs, seed, **settings)
            for name, drafter in drafters.items():
                for budget in args.budgets:
                    options = {"assistant_model": drafter, "tree_budget": budget, "tree_sampling": "target"}
                    key = (args.max_new_tokens, seed, mode, name, budget)
                    tree = results.get(key, generate, model, inputs, seed, **options, **settings)
                    equal[f"{name}/{mode}/{budget}"].append(tree == plain)
                    if tree != plain:
                        tqdm.write(f"{key} differs on {prompt!r}")
    compared = sum(map(len, equal.values()))
    counts = {name: sum(values) for name, values in equal.items()}
    return {"compared": compared, "equal": counts}, sum(counts.values()) < compared


def check_bfloat16(model, tokenizer, drafters, args):
    """The rate of emitted tokens that are not the plain maximum, and the largest distance from it in ulps."""
    results, gaps = Results(args.output), defaultdict(list)
    for seed, prompt in enumerate(tqdm(PROMPTS[: args.prompts], unit="prompt")):
        inputs = prompt_ids(tokenizer, prompt)
        runs = {"native prompt look-up": {"prompt_lookup_num_tokens": 10}}
        for name, drafter in drafters.items():
            for budget in args.budgets:
                runs[f"{name}/{budget}"] = {"assistant_model": drafter, "tree_budget": budget}
        for name, options in runs.items():
            settings = {"max_new_tokens": args.max_new_tokens, "do_sample": False, **options}
            key = (args.max_new_tokens, seed, "bfloat16", name)
            gaps[name] += results.get(key, teacher_forced, model, inputs, seed, settings)
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


def teacher_forced(model, inputs, seed: int, settings: dict) -> list[float]:
    """Generate, then measure each token against plain decoding of the same prefix."""
    return distances_from_maximum(model, inputs["input_ids"], generate(model, inputs, seed, **settings))


@torch.no_grad()
def distances_from_maximum(model, prompt: torch.Tensor, tokens: list[int]) -> list[float]:
    """Per token, how far its logit is below the maximum of plain decoding after the same prefix, in bf16 ulps."""
    outputs = model(prompt, use_cache=True, logits_to_keep=1)
    distances = []
    for token in tokens:
        logits = outputs.logits[0, -1].float()
        best = logits.max()
        ulp = 2.0 ** (torch.floor(torch.log2(best.abs())) - 7)  # bf16 has 8 significant bits
        distances.append(float((best - logits[token]) / ulp))
        outputs = model(torch.tensor([[token]]), cache=outputs.cache, use_cache=True)
    return distances


if __name__ == "__main__":
    main()
