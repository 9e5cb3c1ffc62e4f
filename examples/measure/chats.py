"""Does a drafter accept as much in a chat with one cache as with a full prefill? Print a table, and one JSON line.

    python examples/measure/chats.py

Every chat begins with a question of prompts.jsonl. In a related chat, the later turns ask to write the answer again. In
an unrelated chat, they are other questions. The later turns receive the conversation so far in one of three ways:

- full: without a cache. Target and drafter run the whole conversation again.
- returned: with the cache that the turn before returned.
- copied: with a copy of this cache. It has the same keys and values, but the drafter has read nothing of it.

The table has the tokens per round of each turn, pooled over the chats. It is measured in fp32 with greedy decoding, so
the texts must be equal. The exit status is 1 if texts differ, or if the tokens per round of the later turns with the
returned cache differ by more than 5% from those with a full prefill.
"""

import argparse
import copy
import itertools
import json
from typing import Any

import torch
from prompts import chat_inputs, read_questions
from resumable import Results
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import hf_ddtree
from hf_ddtree.embedded import load_models
from hf_ddtree.testing import truncated_copy

WAYS = ("full", "returned", "copied")
DRAFTERS = ("dflash", "truncated")
KINDS = ("related", "unrelated")
QUESTIONS_BETWEEN_CHATS = 3  # from the first question of a chat to that of the next one
FOLLOW_UPS = (
    "Please write that again.",
    "Please write that once more, and change one detail.",
    "Put both versions into one list.",
)
MAX_DIFFERENCE = 0.05
MARK = "ANSWER"

Turns = list[tuple[int, int, list[int]]]  # the emitted tokens, the rounds and the new text of each turn of a chat
Chats = dict[tuple[str, str], dict[str, list[Turns]]]  # (drafter, kind) -> way -> chats


def main() -> None:
    """Measure every drafter and way, print the table and the report, and exit with status 1 if a condition fails."""
    options = parse_options()
    model, tokenizer, dflash = load_models(assistant_model=options.drafter)
    hf_ddtree.enable(model)
    chats = measure(model, tokenizer, {"dflash": dflash, "truncated": truncated_copy(model, 6)}, options)
    print(table(chats))
    ratios = {case: later(by_way["returned"]) / later(by_way["full"]) for case, by_way in chats.items()}
    equal = all(texts(by_way[way]) == texts(by_way["full"]) for by_way in chats.values() for way in WAYS)
    rounded = {"/".join(case): round(ratio, 3) for case, ratio in ratios.items()}
    print(json.dumps({**vars(options), "returned_to_full": rounded, "texts_equal": equal}))
    raise SystemExit(not equal or any(abs(ratio - 1) > MAX_DIFFERENCE for ratio in ratios.values()))


def parse_options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafter", help="path or Hub id for 'dflash' (default: the embedded model's own drafter)")
    parser.add_argument(
        "--drafters", nargs="+", choices=DRAFTERS, default=list(DRAFTERS), help="truncated: the target's first 6 layers"
    )
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="of chats")
    parser.add_argument("--chats", type=int, default=8, help="chats of each kind")
    parser.add_argument("--turns", type=int, default=4, help="turns per chat, at least 2")
    parser.add_argument("--budget", type=int, default=16, help="tree budget")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="tokens per answer")
    parser.add_argument("--output", help="JSONL file with which a stopped run can be continued")
    return parser.parse_args()


def measure(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    drafters: dict[str, PreTrainedModel],
    options: argparse.Namespace,
) -> Chats:
    """Run every chat with every drafter and in every way."""
    results = Results(options.output)
    cases = list(itertools.product(options.drafters, options.kinds))
    chats: Chats = {case: {way: [] for way in WAYS} for case in cases}
    settings = {"tree_budget": options.budget, "max_new_tokens": options.max_new_tokens}
    for chat in tqdm(range(options.chats), unit="chat"):
        for (name, kind), way in itertools.product(cases, WAYS):
            messages = messages_of(chat, kind, options.turns)
            key = (name, kind, chat, way, options.turns, *settings.values())
            turns = results.get(key, run_chat, model, tokenizer, drafters[name], messages, way, settings)
            chats[name, kind][way].append(turns)
    return chats


def messages_of(chat: int, kind: str, n_turns: int) -> list[str]:
    """Return the user's messages in a chat.

    Args:
        chat: the number of the chat.
        kind: "related" or "unrelated".
        n_turns: how many messages.
    """
    questions, first = read_questions(), chat * QUESTIONS_BETWEEN_CHATS
    if kind == "related":
        follow_ups = itertools.islice(itertools.cycle(FOLLOW_UPS), n_turns - 1)
        return [questions[first % len(questions)], *follow_ups]
    return [questions[(first + turn) % len(questions)] for turn in range(n_turns)]


def run_chat(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    drafter: PreTrainedModel,
    messages: list[str],
    way: str,
    settings: dict[str, Any],
) -> Turns:
    """Send the messages one after the other in one chat, and return its turns."""
    turns: Turns = []
    cache, input_ids = None, chat_inputs(tokenizer, messages[0])["input_ids"]
    for turn, message in enumerate(messages):
        if turn > 0:
            input_ids = torch.cat([input_ids, next_message(tokenizer, message)], dim=1)
        output = model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            assistant_model=drafter,
            cache=cache,
            do_sample=False,
            return_dict_in_generate=True,
            **settings,
        )
        new = output.sequences[0, input_ids.shape[1] :].tolist()
        turns.append((sum(r.accepted_length + 1 for r in output.rounds), len(output.rounds), new))
        # the next message begins with the token that ends an answer
        input_ids = output.sequences[:, :-1] if new[-1] == tokenizer.eos_token_id else output.sequences
        cache = None if way == "full" else output.cache
        if way == "copied":
            cache = copy.deepcopy(cache)
    return turns


def next_message(tokenizer: PreTrainedTokenizerBase, message: str) -> torch.Tensor:
    """Return the tokens from the end of an answer to the start of the next answer, `[1, n]`."""
    chat = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": MARK},
        {"role": "user", "content": message},
    ]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    return tokenizer(text.split(MARK, 1)[1], add_special_tokens=False, return_tensors="pt")["input_ids"]


def tokens_per_round(turns: list[tuple[int, int, list[int]]]) -> float:
    """Return the tokens per round, pooled over some turns."""
    return sum(emitted for emitted, _, _ in turns) / sum(rounds for _, rounds, _ in turns)


def later(chats: list[Turns]) -> float:
    """Return the tokens per round of all turns but the first ones, pooled over the chats."""
    return tokens_per_round([turn for turns in chats for turn in turns[1:]])


def texts(chats: list[Turns]) -> list[list[list[int]]]:
    """Return the new tokens of every turn of every chat."""
    return [[tokens for _, _, tokens in turns] for turns in chats]


def table(chats: Chats) -> str:
    """Return a Markdown table with one line per drafter, kind and way, and one column per turn."""
    n_turns = len(next(iter(chats.values()))["full"][0])
    names = [f"turn {i + 1}" for i in range(n_turns)]
    lines = [f"| drafter | chats | cache | {' | '.join(names)} | turns 2 to {n_turns} |", "|" + "---|" * (n_turns + 4)]
    for (name, kind), by_way in chats.items():
        for way, runs in by_way.items():
            cells = [f"{tokens_per_round([turns[i] for turns in runs]):.2f}" for i in range(n_turns)]
            lines.append(f"| {name} | {kind} | {way} | {' | '.join(cells)} | {later(runs):.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
