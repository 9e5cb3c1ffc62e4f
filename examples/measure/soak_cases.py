"""The random requests of soak.py: every choice of a request follows from one seed."""

import random
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel, StoppingCriteria

import hf_ddtree
from hf_ddtree.drafters.chain import chain_drafter
from hf_ddtree.testing import (
    ALL_FAMILIES,
    INCONSISTENT_FAMILIES,
    VOCAB_SIZE,
    ScriptedDrafter,
    char_tokenizer,
    tiny_dflash_drafter,
    tiny_model,
    tiny_muse_glimmer_drafter,
    truncated_copy,
)

SUPPORTED = sorted(ALL_FAMILIES.keys() - INCONSISTENT_FAMILIES.keys())
FULL_ATTENTION = ("deepseek_v3", "gpt2", "granite", "llama", "mixtral", "olmo2", "qwen2", "qwen3")
PROCESSORS: dict[str, dict[str, Any]] = {
    "repetition penalty": {"repetition_penalty": 1.5},
    "no repeated pairs": {"no_repeat_ngram_size": 2},
    "bad words": {"bad_words_ids": [[7], [9, 11], [20, 21, 22]]},
    "bias": {"sequence_bias": {(5,): 2.0, (6, 8): -4.0}},
    "suppressed tokens": {"suppress_tokens": list(range(30, 60))},
    "first token": {"begin_suppress_tokens": list(range(60, 90))},
    "minimum length": {"min_new_tokens": 6},
    "forced end": {"forced_eos_token_id": 2},
    "prompt penalty": {"encoder_repetition_penalty": 1.3},
    "length penalty": {"exponential_decay_length_penalty": (4, 1.2), "eos_token_id": 2},
    "allowed tokens": {"prefix_allowed_tokens_fn": lambda batch_id, ids: [t for t in range(4, 120) if t != ids[-1]]},
    "guidance": {"guidance_scale": 1.4},
    "without invalid values": {"remove_invalid_values": True, "renormalize_logits": True},
    "counting": {},
    "fewer columns": {},
}
WARPERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.7},
    {"top_k": 5},
    {"top_p": 0.7},
    {"min_p": 0.05, "temperature": 0.9},
    {"top_k": 20, "top_p": 0.9, "temperature": 0.8},
]


class Counting(LogitsProcessor):
    """Forbids tokens by the number of its calls, so one call too many changes the text."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        forbidden = torch.arange(self.calls % 3, scores.shape[1], 3, dtype=torch.long, device=scores.device)
        return scores.index_fill(1, forbidden, -torch.inf)


class FewerColumns(LogitsProcessor):
    """Drops the end of the vocabulary."""

    def __call__(self, input_ids, scores):
        return scores[:, : VOCAB_SIZE - 7]


class LastTokenIsRound(StoppingCriteria):
    """Ends the text at a multiple of 16."""

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] % 16 == 0


@dataclass(frozen=True)
class Case:
    """One random request. The fields are plain values, so that they can be printed."""

    seed: int
    family: str
    attention: str
    drafter: str
    tree_budget: int | str
    tree_sampling: str
    warpers: dict[str, Any] | None  # None for greedy decoding
    processors: tuple[str, ...]
    max_new_tokens: int
    stop: str | None
    eos_token_ids: tuple[int, ...]
    prompt_length: int
    padding: int
    mask_dtype: torch.dtype | None
    ids_dtype: torch.dtype
    first_position: int
    prior: str | None
    prefill_chunk_size: int | None
    default_dtype: torch.dtype | None
    default_device: str | None
    outputs: tuple[str, ...]
    streams: bool

    @property
    def comparable(self) -> bool:
        """Whether the tokens must equal those of plain `generate` with the same seed."""
        return self.warpers is None or self.tree_sampling == "target"


def random_case(seed: int) -> Case:
    """Return the case of a seed."""
    rng = random.Random(seed)
    family = rng.choice(SUPPORTED)
    eager_only = ALL_FAMILIES[family].get("attn_implementation") == "eager"
    padding = rng.choice([0, 0, 0, 1, 5])
    prior = rng.choice([None] * 6 + ["plain", "tree", "cropped"])
    if prior == "cropped" and family not in FULL_ATTENTION:
        prior = "tree"  # other caches cannot be cropped far enough
    greedy = rng.random() < 0.5
    default_device = rng.choice([None] * 9 + ["meta"])
    # transformers keeps the tables of stop strings for later calls, and they would have no values
    stops = [None, None, None, "criterion"] if default_device else [None, None, None, "string", "criterion"]
    return Case(
        seed=seed,
        family=family,
        attention="eager" if eager_only else rng.choice(["sdpa", "sdpa", "sdpa", "eager"]),
        drafter=rng.choice(drafters_of(family)),
        tree_budget=rng.choice([1, 2, 3, 5, 8, 12, 16, 24, 40, 400, "auto"]),
        tree_sampling=rng.choice(["target", "target", "hybrid", "swor", "spectr"]),
        warpers=None if greedy else rng.choice(WARPERS),
        processors=tuple(rng.sample(sorted(PROCESSORS), rng.choice([0, 0, 0, 1, 1, 2, 3]))),
        max_new_tokens=rng.choice([1, 2, 3, 8, 12, 20, 30, 40]),
        stop=rng.choice(stops),
        eos_token_ids=tuple(rng.sample(range(4, VOCAB_SIZE), rng.choice([0, 0, 1, 2, 8]))),
        prompt_length=rng.choice([1, 2, 5, 12, 15, 16, 17, 24, 40]),
        padding=padding,
        mask_dtype=rng.choice([None, torch.long, torch.bool, torch.float32, torch.int32])
        if not padding
        else torch.long,
        ids_dtype=rng.choice([torch.long] * 4 + [torch.int32]),
        first_position=0 if padding or prior or rng.random() < 0.9 else rng.choice([1, 9, 30]),
        prior=None if padding else prior,
        prefill_chunk_size=rng.choice([None, None, None, 1, 4, 100]),
        default_dtype=rng.choice([None] * 6 + [torch.bfloat16, torch.float16, torch.float64]),
        default_device=default_device,
        outputs=tuple(name for name in ("scores", "logits", "hidden_states") if rng.random() < 0.3),
        streams=rng.random() < 0.2,
    )


def drafters_of(family: str) -> list[str]:
    """Return the names of the drafters that fit a family."""
    names = ["look-up", "scripted", "scripted", "causal LM", "mixture"]
    if not family.startswith("gemma3n"):
        names += ["DFlash", "DFlash", "Muse Glimmer", "chain"]
    if family in FULL_ATTENTION:
        names += ["itself", "truncated"]
    return names


@cache
def model_of(family: str, attention: str) -> PreTrainedModel:
    """Return the enabled target of a case."""
    return hf_ddtree.enable(tiny_model(family, attn_implementation=attention))


@cache
def drafter_model(name: str, family: str, attention: str) -> PreTrainedModel | None:
    """Return the model of a drafter, or None for prompt look-up."""
    target = model_of(family, attention)
    makers = {
        "look-up": lambda: None,
        "causal LM": lambda: tiny_model("llama", seed=1),
        "mixture": lambda: tiny_model("qwen3_moe", seed=1),
        "DFlash": lambda: tiny_dflash_drafter(target),
        "chain": lambda: tiny_dflash_drafter(target),
        "Muse Glimmer": lambda: tiny_muse_glimmer_drafter(target),
        "itself": lambda: target,
        "truncated": lambda: truncated_copy(hf_ddtree.disable(tiny_model(family)), 2),
    }
    return makers[name]()


def drafter_of(case: Case, script: list[int]) -> Any:
    """Return the `assistant_model` of a case. A scripted drafter gets the text that plain `generate` gives."""
    if case.drafter == "scripted":
        return ScriptedDrafter(script, hit_rate=random.Random(case.seed).choice([0.3, 0.7, 0.95]), seed=case.seed)
    model = drafter_model(case.drafter, case.family, case.attention)
    return chain_drafter(model, model_of(case.family, case.attention)) if case.drafter == "chain" else model


def settings_of(case: Case) -> dict[str, Any]:
    """Return the arguments of `generate` apart from the inputs and the tree. Processors with a state are new."""
    settings: dict[str, Any] = {
        "max_new_tokens": case.max_new_tokens,
        "eos_token_id": list(case.eos_token_ids) or None,
        "do_sample": case.warpers is not None,
        "return_dict_in_generate": True,
        "output_scores": True,
        **{f"output_{name}": True for name in case.outputs},
        **(case.warpers or {}),
    }
    for name in case.processors:
        settings.update(PROCESSORS[name])
    own = {"counting": Counting, "fewer columns": FewerColumns}
    settings["logits_processor"] = LogitsProcessorList(own[name]() for name in case.processors if name in own)
    if case.prefill_chunk_size is not None:
        settings["prefill_chunk_size"] = case.prefill_chunk_size
    if case.stop == "criterion":
        settings["stopping_criteria"] = [LastTokenIsRound()]
    if case.stop == "string":
        settings.update(stop_strings=["a", "B7", "?!"], tokenizer=char_tokenizer())
    return settings


def inputs_of(case: Case) -> dict[str, torch.Tensor]:
    """Return the prompt of a case and what belongs to it."""
    generator = torch.Generator(device="cpu").manual_seed(case.seed)
    shape = (1, case.padding + case.prompt_length)
    ids = torch.randint(4, VOCAB_SIZE, shape, generator=generator, dtype=torch.long, device="cpu")
    ids[:, : case.padding] = 0
    inputs = {"input_ids": ids.to(case.ids_dtype)}
    if case.mask_dtype is not None:
        mask = torch.arange(shape[1], dtype=torch.long, device="cpu")[None] >= case.padding
        inputs["attention_mask"] = mask.to(case.mask_dtype)
    if case.first_position:
        positions = torch.arange(case.prompt_length, dtype=torch.long, device="cpu")[None]
        inputs["position_ids"] = positions + case.first_position
    return inputs
