"""Generate the same text plainly and with a draft tree, and compare the texts and the times.

    python examples/quickstart.py

It needs no network and no GPU.
"""

import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import hf_ddtree

PROMPT = """Add a docstring to each method of this class:

```python
class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        if not self.items:
            raise IndexError("pop from an empty stack")
        return self.items.pop()
```"""
TREE_BUDGET = 16


def main() -> int:
    """Print the comparison, and return the exit status: 1 if the texts differ, which would be a bug."""
    model, tokenizer, drafter = hf_ddtree.load_embedded(torch.float32)
    hf_ddtree.enable(model)
    chat = [{"role": "user", "content": PROMPT}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")
    settings = {"do_sample": False, "max_new_tokens": 160, "return_dict_in_generate": True}
    tree = {"assistant_model": drafter, "tree_budget": TREE_BUDGET}

    for options in ({}, tree):  # warm-up
        model.generate(**inputs, **options, max_new_tokens=4)
    plain, plain_seconds = timed(model.generate, **inputs, **settings)
    drafted, drafted_seconds = timed(model.generate, **inputs, **settings, **tree)

    start = inputs["input_ids"].shape[1]
    texts = [tokenizer.decode(output.sequences[0, start:], skip_special_tokens=True) for output in (plain, drafted)]
    equal = torch.equal(plain.sequences, drafted.sequences)
    print(*texts[: 1 if equal else 2], sep="\n--- with a tree:\n")
    new_tokens = plain.sequences.shape[1] - start
    print(f"\ntexts equal        {equal}, {new_tokens} tokens")
    print(f"rounds             {len(drafted.rounds)}, {drafted.tokens_per_round:.2f} tokens per round")
    print(f"plain generate     {new_tokens / plain_seconds:.1f} tokens/s")
    print(f"tree budget {TREE_BUDGET}     {(drafted.sequences.shape[1] - start) / drafted_seconds:.1f} tokens/s")
    print(f"speedup            {plain_seconds / drafted_seconds:.2f}")
    return 0 if equal else 1


def timed(function: Callable[..., Any], **kwargs: Any) -> tuple[Any, float]:
    """Call a function, and return its result and the seconds that it took."""
    start = time.perf_counter()
    result = function(**kwargs)
    return result, time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main())
