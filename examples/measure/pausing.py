"""What does the automatic budget cost where drafting does not pay? Run the benchmark on two such cases.

    python examples/measure/pausing.py

The first run has a drafter with random weights and the built-in prompts. The second run has the trained drafter and
prompts of random tokens. Both run on the embedded model. With `--output PREFIX` they write PREFIX-untrained and
PREFIX-random. Every other option is passed on to the benchmark.
"""

import argparse
import json
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import PreTrainedTokenizerBase

from hf_ddtree import DFlashDraftModel, load_embedded
from hf_ddtree.benchmark.__main__ import main as benchmark

N_PROMPTS, N_PROMPT_TOKENS = 16, 40


def main() -> None:
    """Run the benchmark twice."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--output", metavar="PREFIX", help="write the rows and plots of both runs")
    own, passed_on = parser.parse_known_args()
    options = ["--tree-budgets", "16,auto", *passed_on]

    def output(name: str) -> list[str]:
        return ["--output", f"{own.output}-{name}"] if own.output else []

    _, tokenizer, drafter = load_embedded()
    torch.manual_seed(0)
    with TemporaryDirectory() as folder:
        untrained, prompts = Path(folder, "untrained"), Path(folder, "random.jsonl")
        DFlashDraftModel(drafter.config).save_pretrained(untrained)
        lines = [json.dumps(random_prompt(tokenizer)) + "\n" for _ in range(N_PROMPTS)]
        prompts.write_text("".join(lines), encoding="utf-8")
        print("An untrained drafter:\n", flush=True)
        benchmark(["--assistant-model", str(untrained), "--limit", str(N_PROMPTS), *options, *output("untrained")])
        print("\nPrompts of random tokens:\n", flush=True)
        benchmark(["--prompts", str(prompts), *options, *output("random")])


def random_prompt(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Return a prompt of random tokens, drawn from the global generator."""
    token_ids = torch.randint(len(tokenizer), (N_PROMPT_TOKENS,))
    return {"prompt": tokenizer.decode(token_ids, skip_special_tokens=True), "kind": "random tokens"}


if __name__ == "__main__":
    main()
