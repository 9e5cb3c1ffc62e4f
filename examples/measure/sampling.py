"""Is sampling with drawn children exact, end to end? Print one line per policy and seed, and one JSON line.

    python examples/measure/sampling.py

The script draws the next three tokens many times through `model.generate`, on a tiny random model, with top-k, top-p
and a repetition penalty. It compares their frequencies with the exact distribution of plain sampling. "total_variation"
should lie below "band", the 99.9% quantile for samples of this size from the exact distribution. "p_value" belongs to
Pearson's chi-squared. The exit status is 1 if a policy leaves the band with every seed.
"""

import argparse
import itertools
import json

import numpy as np
import torch
from tqdm import tqdm
from transformers import LogitsProcessorList, PreTrainedModel, TopKLogitsWarper, TopPLogitsWarper

import hf_ddtree
from hf_ddtree.drafters.dflash import DFlashDrafter
from hf_ddtree.drafters.q import DraftSampling
from hf_ddtree.testing import tiny_dflash_drafter, tiny_model

VOCAB_SIZE, N_TOKENS = 8, 3
PROMPT = torch.tensor([[1, 2, 3]])
TOP_K, TOP_P = 5, 0.8
SAMPLING = {"do_sample": True, "top_k": TOP_K, "top_p": TOP_P, "repetition_penalty": 1.3}
N_REFERENCE_SAMPLES = 10_000  # samples from the exact distribution, for the band and the p-value


def main() -> None:
    """Check every policy with every seed, and exit with status 1 if a policy fails with every seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=10_000, help="samples per policy and seed")
    parser.add_argument("--seeds", type=int, default=5, help="seeds per policy")
    options = parser.parse_args()
    torch.set_num_threads(1)
    reports = {}
    for policy, seed in tqdm(list(itertools.product(hf_ddtree.POLICIES, range(options.seeds)))):
        reports[f"{policy}/{seed}"] = report = check_distribution(policy, options.samples, seed)
        tqdm.write(f"{policy:8} seed {seed}: {report}")
    print(json.dumps({"samples": options.samples, "reports": reports}))
    inside = {name: report["total_variation"] < report["band"] for name, report in reports.items()}
    seeds = range(options.seeds)
    raise SystemExit(any(not any(inside[f"{policy}/{s}"] for s in seeds) for policy in hf_ddtree.POLICIES))


class EagerSampling(DraftSampling):
    """Expects drawn children to be accepted, so that even a small tree has some, and counts the nodes with draws.

    Attributes:
        tried: at how many nodes the walk met drawn children.
    """

    tried = 0

    def acceptance(self, depth: int) -> float:
        """Return a high estimate."""
        return 0.9

    def update_acceptance(self, overlaps: list[tuple[int, float]]) -> None:
        """Count the proposals that a walk has tried."""
        self.tried += len(overlaps)


def check_distribution(policy: str, n_samples: int, seed: int) -> dict[str, float]:
    """Sample through `generate`, and compare with the exact distribution.

    Args:
        policy: the name of the sampling policy.
        n_samples: the number of samples.
        seed: seeds the sampling.

    Returns:
        What `compare` returns, and "tried": at how many nodes a sample met drawn children, on average.

    Raises:
        KeyError: if a sample has a text that plain sampling never gives.
    """
    fields = {"vocab_size": VOCAB_SIZE, "num_hidden_layers": 1, "initializer_range": 0.15}
    special = {"pad_token_id": None, "bos_token_id": None}
    model = hf_ddtree.enable(tiny_model("llama", **fields, **special))
    dflash = {"mask_token_id": 0, "target_layer_ids": [0]}
    draft_model = tiny_dflash_drafter(model, num_hidden_layers=1, block_size=4, dflash_config=dflash, **special)
    expected = exact_distribution(model)
    torch.manual_seed(seed)
    counts, tried = dict.fromkeys(expected, 0), 0
    warpers = LogitsProcessorList([TopKLogitsWarper(TOP_K), TopPLogitsWarper(TOP_P)])
    for _ in range(n_samples):
        sampling = EagerSampling(hf_ddtree.POLICIES[policy], warpers)
        drafter = DFlashDrafter(draft_model, model, sampling)
        output = model.generate(PROMPT, **SAMPLING, assistant_model=drafter, tree_budget=3, max_new_tokens=N_TOKENS)
        counts[tuple(output[0, PROMPT.shape[1] :].tolist())] += 1
        tried += sampling.tried
    statistics = compare(np.array(list(counts.values())), np.array(list(expected.values())))
    return {**statistics, "tried": tried / n_samples}


def exact_distribution(model: PreTrainedModel) -> dict[tuple[int, ...], float]:
    """Return the probability of every possible continuation of `N_TOKENS` tokens under plain sampling.

    Args:
        model: the target.
    """
    level: dict[tuple[int, ...], float] = {(): 1.0}
    settings = {**SAMPLING, "max_new_tokens": 1, "return_dict_in_generate": True, "output_scores": True}
    for _ in range(N_TOKENS):
        following = {}
        for prefix, probability in level.items():
            # the repetition penalty counts the whole sequence, so the prefix can be part of the prompt
            prompt = torch.cat([PROMPT, torch.tensor([prefix], dtype=torch.long)], dim=1)
            scores = model.generate(prompt, **settings).scores[0][0]
            for token, p in enumerate(scores.softmax(-1).tolist()):
                if p > 0:
                    following[*prefix, token] = probability * p
        level = following
    return level


def compare(counts: np.ndarray, expected: np.ndarray) -> dict[str, float]:
    """Return total variation, its band, and the p-value of chi-squared.

    Band and p-value come from samples of the same size from the exact distribution.

    Args:
        counts: how often each outcome was sampled.
        expected: the exact probability of each outcome.
    """
    n = counts.sum()
    expected = expected / expected.sum()
    reference = np.random.default_rng(0).multinomial(n, expected, size=N_REFERENCE_SAMPLES)

    def total_variation(sample: np.ndarray) -> np.ndarray:
        return abs(sample / n - expected).sum(-1) / 2

    def chi_squared(sample: np.ndarray) -> np.ndarray:
        return ((sample - n * expected) ** 2 / (n * expected)).sum(-1)

    return {
        "total_variation": round(float(total_variation(counts)), 5),
        "band": round(float(np.quantile(total_variation(reference), 0.999)), 5),
        "p_value": round(float((chi_squared(reference) >= chi_squared(counts)).mean()), 4),
    }


if __name__ == "__main__":
    main()
