"""Is sampling with drawn children exact, end to end? Prints a table over policies and seeds and one JSON line.

    python examples/sampling.py

Draws the next three tokens many times through `model.generate` on a tiny random model, with top-k, top-p and a repetition
penalty, and compares with the exact distribution of plain sampling: total variation against the 99.9% quantile that
samples of this size have by themselves, and Pearson's chi-squared. The exit status is 1 if a policy leaves the band on
every seed.
"""

import argparse
import itertools
import json

import numpy as np
import torch
from tqdm import tqdm
from transformers import GenerationConfig

import hf_ddtree
from hf_ddtree.drafters import DFlashTreeGenerator, DraftSampling
from hf_ddtree.testing import tiny_dflash_drafter, tiny_model
from hf_ddtree.tree import POLICIES

VOCAB_SIZE, LENGTH = 8, 3
PROMPT = torch.tensor([[1, 2, 3]])
SAMPLING = {"do_sample": True, "top_k": 5, "top_p": 0.8, "repetition_penalty": 1.3}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    reports = {}
    for policy, seed in tqdm(list(itertools.product(POLICIES, range(args.seeds)))):
        reports[f"{policy}/{seed}"] = report = check_distribution(policy, args.samples, seed)
        tqdm.write(f"{policy:8} seed {seed}: {report}")
    print(json.dumps({"samples": args.samples, "reports": reports}))
    inside = {name: report["total_variation"] < report["band"] for name, report in reports.items()}
    raise SystemExit(any(not any(inside[f"{policy}/{s}"] for s in range(args.seeds)) for policy in POLICIES))


class EagerSampling(DraftSampling):
    """Expects drawn children to be accepted, so that even a small tree has some; counts the nodes where they were tried."""

    tried = 0

    def acceptance(self, depth):
        return 0.9

    def observe(self, overlaps):
        self.tried += len(overlaps)


def check_distribution(policy: str, n_samples: int, seed: int) -> dict[str, float]:
    """Sample through `generate` and compare with the exact distribution.

    Returns:
        What `compare` says, and "tried": at how many nodes a sample met drawn children, on average.
    """
    fields = {"vocab_size": VOCAB_SIZE, "num_hidden_layers": 1, "initializer_range": 0.15}
    special = {"pad_token_id": None, "bos_token_id": None}
    model = hf_ddtree.enable(tiny_model("llama", **fields, **special))
    dflash = {"mask_token_id": 0, "target_layer_ids": [0]}
    drafter = tiny_dflash_drafter(model, num_hidden_layers=1, block_size=4, dflash_config=dflash, **special)
    expected = exact_distribution(model)
    torch.manual_seed(seed)
    counts, tried = dict.fromkeys(expected, 0), 0
    for _ in range(n_samples):
        sampling = EagerSampling(GenerationConfig(**SAMPLING), POLICIES[policy])
        generator = DFlashTreeGenerator(drafter, model, sampling)
        output = model.generate(PROMPT, **SAMPLING, assistant_model=generator, tree_budget=3, max_new_tokens=LENGTH)
        counts[tuple(output[0, PROMPT.shape[1] :].tolist())] += 1  # a KeyError: a token that plain sampling never emits
        tried += sampling.tried
    statistics = compare(np.array(list(counts.values())), np.array(list(expected.values())))
    return {**statistics, "tried": tried / n_samples}


def exact_distribution(model) -> dict[tuple[int, ...], float]:
    """The probability of every possible continuation under plain sampling."""
    result, level = {}, {(): 1.0}
    for _ in range(LENGTH):
        following = {}
        for prefix, probability in level.items():
            # the penalty counts the whole sequence, so a prefix may as well be part of the prompt
            prompt = torch.cat([PROMPT, torch.tensor([prefix], dtype=torch.long)], dim=1)
            output = model.generate(
                prompt, **SAMPLING, max_new_tokens=1, return_dict_in_generate=True, output_scores=True
            )
            for token, p in enumerate(output.scores[0][0].softmax(-1).tolist()):
                if p > 0:
                    following[*prefix, token] = probability * p
        level = following
    result.update(level)
    return result


def compare(counts: np.ndarray, expected: np.ndarray) -> dict[str, float]:
    """Total variation and chi-squared, each against 10,000 samples of the same size from `expected` itself."""
    n = counts.sum()
    expected = expected / expected.sum()
    own = np.random.default_rng(0).multinomial(n, expected, size=10_000)
    statistics = {
        "total_variation": lambda c: abs(c / n - expected).sum(-1) / 2,
        "chi_squared": lambda c: ((c - n * expected) ** 2 / (n * expected)).sum(-1),
    }
    values = {name: (function(counts), function(own)) for name, function in statistics.items()}
    return {
        "total_variation": round(float(values["total_variation"][0]), 5),
        "band": round(float(np.quantile(values["total_variation"][1], 0.999)), 5),
        "p_value": round(float((values["chi_squared"][1] >= values["chi_squared"][0]).mean()), 4),
    }


if __name__ == "__main__":
    main()
