"""Host work per round: everything but the two model forwards, at several budgets; prints one JSON line.

    python examples/host_cost.py

Measured on a stand-in of SmolLM2's shape for the cache, without running a model: building the tree from draft logits,
its mask, the walk down 4 accepted tokens, and the commit. Medians over `--repeats` rounds. The scan of the vocabulary (top-k
and normaliser of the draft logits) is shown beside the total, not in it. "sampled walk" is the walk of the same path under
sampling, by policy; its difference from "target" is what drawn children cost there.
"""

import argparse
import itertools
import json
import statistics
import time

import torch
from transformers import AutoConfig, DynamicCache, LogitsProcessorList, MaxLengthCriteria, StoppingCriteriaList

import hf_ddtree
from hf_ddtree.cache import commit_path
from hf_ddtree.masks import tree_attention_mask
from hf_ddtree.randomness import Randomness
from hf_ddtree.tree import POLICIES
from hf_ddtree.verify import path_to
from hf_ddtree.walk import Emitter, walk_tree

VOCAB_SIZE, LAYERS, KV_HEADS, HEAD_DIM = 49_152, 30, 3, 64
CONTEXT, DEPTH, ACCEPTED = 512, 15, 4


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budgets", nargs="+", type=int, default=[16, 64, 256, 1024])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    # as a forward's activations do: glibc then keeps freed memory of that size, where it otherwise maps it anew each time
    torch.zeros(30, 1024, 1024, dtype=torch.uint8)
    report = {budget: measure(budget, args.repeats) for budget in args.budgets}
    sampled = {policy: sampled_walk(policy, args.repeats) for policy in POLICIES}
    figures = {"milliseconds": report, "sampled walk": sampled}
    print(json.dumps({"threads": args.threads, "vocab_size": VOCAB_SIZE, **figures}))


@torch.no_grad()
def measure(budget: int, repeats: int) -> dict[str, float]:
    """Median milliseconds per stage."""
    draft_logits = 3 * torch.randn(DEPTH, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    rounds = [one_round(draft_logits, budget) for _ in range(repeats + 2)][2:]
    stages = {name: statistics.median(r[name] for r in rounds) for name in rounds[0]}
    stages = {"total": sum(stages.values()) - stages["vocabulary scan"], **stages}
    return {name: round(1000 * value, 3) for name, value in stages.items()}


def one_round(draft_logits: torch.Tensor, budget: int) -> dict[str, float]:
    """Seconds per stage of one round."""
    clock, seconds = time.perf_counter, {}

    start = clock()
    top_logits = draft_logits.topk(min(budget, VOCAB_SIZE)).values
    draft_logits.logsumexp(-1)
    seconds["vocabulary scan"] = clock() - start

    start = clock()
    tree = hf_ddtree.build_tree(top_logits, budget, root_token_id=0)  # without the tail there is nothing to scan
    seconds["build_tree"] = clock() - start

    config = AutoConfig.for_model("llama", num_hidden_layers=LAYERS)
    cache = DynamicCache()
    fill(cache, CONTEXT)
    start = clock()
    tree_attention_mask(
        config, cache, tree.depths, tree.depths, tree.ancestor_mask, None, dtype=torch.float32, device="cpu"
    )
    seconds["mask"] = clock() - start

    path = deep_path(tree)
    node_logits = target_logits(tree, path)
    seconds["walk"] = walk_seconds(tree, path, node_logits, do_sample=False)

    fill(cache, len(tree))
    start = clock()
    commit_path(cache, path, len(tree))
    seconds["commit"] = clock() - start
    return seconds


@torch.no_grad()
def sampled_walk(policy: str, repeats: int) -> float:
    """Median milliseconds of a walk under sampling at budget 64, every draw on the path being rejected."""
    draft_logits = 3 * torch.randn(DEPTH, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    tree = hf_ddtree.build_tree(draft_logits, 64, 0, POLICIES[policy], [0.3] * DEPTH, Randomness(0))
    path = deep_path(tree)
    logits = 1e4 * target_logits(tree, path)
    times = [walk_seconds(tree, path, logits, do_sample=True) for _ in range(repeats + 2)][2:]
    return round(1000 * statistics.median(times) * (ACCEPTED + 1) / len(path), 3)


def walk_seconds(tree, path: list[int], node_logits: torch.Tensor, do_sample: bool) -> float:
    """Seconds of a walk that takes `path`."""
    emitter = Emitter(
        torch.zeros(1, CONTEXT, dtype=torch.long),
        LogitsProcessorList(),
        StoppingCriteriaList([MaxLengthCriteria(10 * CONTEXT)]),
        do_sample=do_sample,
    )
    start = time.perf_counter()
    walked = walk_tree(tree, node_logits, emitter)
    seconds = time.perf_counter() - start
    if walked != path:
        raise RuntimeError(f"the walk took {walked}, not {path}")
    return seconds


def fill(cache: DynamicCache, rows: int) -> None:
    for layer in range(LAYERS):
        cache.update(*torch.zeros(2, 1, KV_HEADS, rows, HEAD_DIM), layer)


def deep_path(tree) -> list[int]:
    """A path of `ACCEPTED` drafted tokens, or as many as the tree is deep."""
    depth = min(ACCEPTED, int(tree.depths.max()))
    return path_to(int((tree.depths == depth).nonzero()[-1]), tree.parents.tolist())


def target_logits(tree, path: list[int]) -> torch.Tensor:
    """Logits under which the walk takes `path` and then leaves the tree."""
    logits = torch.zeros(1, len(tree), VOCAB_SIZE)
    for node, child in itertools.pairwise(path):
        logits[0, node, tree.token_ids[child]] = 1
    outside = next(token for token in range(VOCAB_SIZE) if tree.child(path[-1], token) is None)
    logits[0, path[-1], outside] = 1
    return logits


if __name__ == "__main__":
    main()
