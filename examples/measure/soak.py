"""Compare random requests with plain `generate` for hours, and print the seed of each one that differs.

    python examples/measure/soak.py --minutes 60 --output soak.jsonl   # go on where an earlier run stopped
    python examples/measure/soak.py --cases 5000
    python examples/measure/soak.py --seed 4711                        # one request in words, and what came of it

Each request is random: the family of the target, the drafter, the budget, the policy, processors, stops, padding, a
cache of an earlier turn, a prefill in chunks, torch's default dtype and device, and what is returned. Tokens, scores,
logits, hidden states, the stream and the cache must equal those of plain `generate` with the same seed. If a policy
draws children, plain `generate` is made to follow the text of the tree, and everything but the scores is compared.

The exit status is 1 if a request differs or is refused although plain `generate` serves it. The last line is JSON.
"""

import argparse
import json
import os
import tempfile
import time
import warnings
from collections import Counter

import torch
from resumable import Results
from soak_cases import random_case
from soak_run import DIFFERENT, REFUSED, run
from tqdm import tqdm
from transformers.utils import logging


def main() -> None:
    """Run the cases, print those that fail, and exit with status 1 if there are any."""
    options = parse_options()
    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    torch.set_num_threads(1)  # tiny models gain nothing from more
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache  # the automatic budget stores the costs of every tiny model
        if options.seed is not None:
            print(random_case(options.seed))
            report = run(random_case(options.seed))
            print(report["detail"])
            raise SystemExit(report["outcome"] in (DIFFERENT, REFUSED))
        counts, failed = soak(options)
    print(json.dumps({**vars(options), "outcomes": counts, "failed_seeds": failed}))
    raise SystemExit(bool(failed))


def parse_options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=5000, help="how many requests")
    parser.add_argument("--first-seed", type=int, default=0, help="the seed of the first request")
    parser.add_argument("--minutes", type=float, help="stop after this time, too")
    parser.add_argument("--seed", type=int, help="run the request of this seed alone")
    parser.add_argument("--output", help="JSONL file with which a stopped run can be continued")
    return parser.parse_args()


def soak(options: argparse.Namespace) -> tuple[dict[str, int], list[int]]:
    """Return how many requests had each outcome, and the seeds of those that failed."""
    results, counts, failed, start = Results(options.output), Counter(), [], time.monotonic()
    for seed in tqdm(range(options.first_seed, options.first_seed + options.cases), unit="request"):
        if options.minutes is not None and time.monotonic() - start > 60 * options.minutes:
            break
        report = results.get((seed,), lambda seed=seed: run(random_case(seed)))
        counts[report["outcome"]] += 1
        if report["outcome"] in (DIFFERENT, REFUSED):
            failed.append(seed)
            tqdm.write(f"seed {seed}: {report['outcome']}\n{random_case(seed)}\n{report['detail']}")
    return dict(counts), failed


if __name__ == "__main__":
    main()
