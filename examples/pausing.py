"""What the automatic budget costs where drafting does not pay: two runs of the benchmark on the embedded model.

    python examples/pausing.py

First with a drafter that was never trained, on the built-in prompts; then with the trained one, on prompts of random tokens.
Options are passed on to the benchmark; of `--output PREFIX` it makes PREFIX-untrained and PREFIX-random.
"""

import argparse
import json
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from hf_ddtree import DFlashDraftModel
from hf_ddtree.benchmark.__main__ import main as benchmark
from hf_ddtree.embedded import load_embedded

PROMPTS, PROMPT_TOKENS = 16, 40


def main():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--output")
    arguments, passed_on = parser.parse_known_args()
    options = ["--tree-budgets", "16,auto", *passed_on]

    def output(name: str) -> list[str]:
        return ["--output", f"{arguments.output}-{name}"] if arguments.output else []

    _, tokenizer, drafter = load_embedded()
    torch.manual_seed(0)
    with TemporaryDirectory() as folder:
        untrained, prompts = Path(folder, "untrained"), Path(folder, "random.jsonl")
        DFlashDraftModel(drafter.config).save_pretrained(untrained)
        prompts.write_text("".join(f"{json.dumps(random_prompt(tokenizer))}\n" for _ in range(PROMPTS)))
        print("An untrained drafter:\n", flush=True)
        benchmark(["--assistant-model", str(untrained), "--limit", str(PROMPTS), *options, *output("untrained")])
        print("\nPrompts of random tokens:\n", flush=True)
        benchmark(["--prompts", str(prompts), *options, *output("random")])


def random_prompt(tokenizer) -> dict:
    text = tokenizer.decode(torch.randint(len(tokenizer), (PROMPT_TOKENS,)), skip_special_tokens=True)
    return {"prompt": text, "kind": "random tokens"}


if __name__ == "__main__":
    main()
