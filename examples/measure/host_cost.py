"""What does tree decoding cost on the host? Time the work of a round without its two forwards, and print one JSON line.

    python examples/measure/host_cost.py

The script runs no model. A cache of SmolLM2's shape stands in for it. "build_tree" builds the tree from draft logits,
"mask" makes its attention mask, "walk" descends 4 accepted tokens, and "commit" keeps them in the cache. "total" is
their sum. All times are median milliseconds over `--repeats` rounds.

"vocabulary scan" is the top-k and the normaliser of the draft logits. It is not part of the total. "sampled walk" is
the walk of the same path under sampling, by policy. Its difference from "target" is what drawn children cost there.
"""

import argparse
import itertools
import json
import statistics
import time

import torch
from transformers import AutoConfig, DynamicCache, LogitsProcessorList, MaxLengthCriteria, StoppingCriteriaList

from hf_ddtree import POLICIES, DraftTree, Randomness, build_tree
from hf_ddtree.target.cache import commit_path
from hf_ddtree.target.masks import tree_attention_mask
from hf_ddtree.walk import Emitter, walk_tree

VOCAB_SIZE, N_LAYERS, N_KV_HEADS, HEAD_DIM = 49_152, 30, 3, 64
LENGTH, DEPTH, ACCEPTED_LENGTH = 512, 15, 4
SAMPLED_BUDGET = 64  # the tree budget of the sampled walk
N_WARM_UP = 2  # rounds before those that count


def main() -> None:
    """Time rounds at every budget, and print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budgets", nargs="+", type=int, default=[16, 64, 256, 1024], help="tree budgets")
    parser.add_argument("--repeats", type=int, default=20, help="rounds per budget")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    # A forward's activations have this effect, too: glibc keeps freed memory of that size for later, instead of mapping
    # it anew each time.
    torch.zeros(30, 1024, 1024, dtype=torch.uint8)
    report = {
        "threads": options.threads,
        "vocab_size": VOCAB_SIZE,
        "milliseconds": {budget: round_milliseconds(budget, options.repeats) for budget in options.budgets},
        "sampled walk": {policy: sampled_walk_milliseconds(policy, options.repeats) for policy in POLICIES},
    }
    print(json.dumps(report))


@torch.no_grad()
def round_milliseconds(budget: int, repeats: int) -> dict[str, float]:
    """Return the median milliseconds of each stage, and their total.

    Args:
        budget: the tree budget.
        repeats: rounds that count.
    """
    draft_logits = random_draft_logits()
    rounds = [round_seconds(draft_logits, budget) for _ in range(repeats + N_WARM_UP)][N_WARM_UP:]
    stages = {name: statistics.median(seconds[name] for seconds in rounds) for name in rounds[0]}
    stages = {"total": sum(stages.values()) - stages["vocabulary scan"], **stages}
    return {name: round(1000 * seconds, 3) for name, seconds in stages.items()}


def round_seconds(draft_logits: torch.Tensor, budget: int) -> dict[str, float]:
    """Run the host's work of one round, and return the seconds of each stage.

    Args:
        draft_logits: `[depth, V]`.
        budget: the tree budget.
    """
    clock, seconds = time.perf_counter, {}

    start = clock()
    top_logits = draft_logits.topk(min(budget, VOCAB_SIZE)).values
    draft_logits.logsumexp(-1)
    seconds["vocabulary scan"] = clock() - start

    start = clock()
    tree = build_tree(top_logits, budget, root_token_id=0)  # the top logits alone leave no vocabulary to scan
    seconds["build_tree"] = clock() - start

    config = AutoConfig.for_model("llama", num_hidden_layers=N_LAYERS)
    cache, device = DynamicCache(), torch.device("cpu")
    add_rows(cache, LENGTH)
    start = clock()
    tree_attention_mask(config, cache, tree.depths, tree.depths, tree.ancestor_mask, None, device)
    seconds["mask"] = clock() - start

    path = deep_path(tree)
    node_logits = target_logits(tree, path)
    seconds["walk"] = walk_seconds(tree, path, node_logits, do_sample=False)

    add_rows(cache, len(tree))
    start = clock()
    commit_path(cache, path, len(tree))
    seconds["commit"] = clock() - start
    return seconds


@torch.no_grad()
def sampled_walk_milliseconds(policy: str, repeats: int) -> float:
    """Return the median milliseconds of a walk under sampling in which every drawn child on the path is rejected.

    Args:
        policy: the name of the sampling policy.
        repeats: walks that count.
    """
    tree = build_tree(random_draft_logits(), SAMPLED_BUDGET, 0, POLICIES[policy], [0.3] * DEPTH, Randomness(0))
    path = deep_path(tree)
    logits = 1e4 * target_logits(tree, path)
    times = [walk_seconds(tree, path, logits, do_sample=True) for _ in range(repeats + N_WARM_UP)][N_WARM_UP:]
    # trees of some policies are less deep, so the time is scaled to the same number of emitted tokens
    return round(1000 * statistics.median(times) * (ACCEPTED_LENGTH + 1) / len(path), 3)


def walk_seconds(tree: DraftTree, path: list[int], node_logits: torch.Tensor, do_sample: bool) -> float:
    """Return the seconds of one walk.

    Args:
        tree: the tree.
        path: the path that the walk must take.
        node_logits: `[1, N, V]`, logits that lead down the path.
        do_sample: whether to sample.

    Raises:
        RuntimeError: if the walk takes another path.
    """
    emitter = Emitter(
        torch.zeros(1, LENGTH, dtype=torch.long),
        LogitsProcessorList(),
        StoppingCriteriaList([MaxLengthCriteria(10 * LENGTH)]),
        do_sample=do_sample,
    )
    start = time.perf_counter()
    walked = walk_tree(tree, node_logits, emitter)
    seconds = time.perf_counter() - start
    if walked != path:
        raise RuntimeError(f"the walk took {walked} instead of {path}")
    return seconds


def random_draft_logits() -> torch.Tensor:
    """Return the same random draft logits in every call, `[depth, V]`."""
    return 3 * torch.randn(DEPTH, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))


def add_rows(cache: DynamicCache, n_rows: int) -> None:
    """Append empty rows to every layer of a cache."""
    for layer in range(N_LAYERS):
        cache.update(*torch.zeros(2, 1, N_KV_HEADS, n_rows, HEAD_DIM), layer)


def deep_path(tree: DraftTree) -> list[int]:
    """Return a path of `ACCEPTED_LENGTH` drafted tokens, or one as deep as the tree if the tree is less deep."""
    depth = min(ACCEPTED_LENGTH, int(tree.depths.max()))
    return tree.path_to(int((tree.depths == depth).nonzero()[-1]))


def target_logits(tree: DraftTree, path: list[int]) -> torch.Tensor:
    """Return logits `[1, N, V]` under which the walk takes `path` and then leaves the tree."""
    logits = torch.zeros(1, len(tree), VOCAB_SIZE)
    for node, child in itertools.pairwise(path):
        logits[0, node, tree.token_ids[child]] = 1
    outside = next(token for token in range(VOCAB_SIZE) if tree.child(path[-1], token) is None)
    logits[0, path[-1], outside] = 1
    return logits


if __name__ == "__main__":
    main()
