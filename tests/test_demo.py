"""The logic behind the page: runs, stopping, verdicts, figures and pictures, all without a browser."""

import math
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

import hf_ddtree
from hf_ddtree import DraftTree
from hf_ddtree.demo import DRAFTER, PROMPT_LOOKUP, Models, Request, Sampling, StopSwitch, compare, tree_svg
from hf_ddtree.demo.models import Loaded
from hf_ddtree.demo.present import conversation_html, round_html, stats_html, telling_round, verdict_html
from hf_ddtree.demo.request import MAX_NEW_TOKENS, MAX_PROMPT_CHARACTERS, MAX_PROMPT_TOKENS
from hf_ddtree.demo.session import DraftedRound
from hf_ddtree.demo.text import escape, shorten, visible, width
from hf_ddtree.demo.verdict import judge
from hf_ddtree.testing import VOCAB_SIZE, tiny_dflash_drafter, tiny_model

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = "</text><script>alert(1)</script>${1+1}{{value}}&amp;\"'`\x00\x1b\u202e\u200b\ufffe\ud800🙂שלום"
REPETITIVE = "abcabcabcabcabc"


@dataclass
class Letters:
    """A tokenizer of single characters, with texts of one's own for some tokens."""

    texts: dict[int, str] = field(default_factory=dict)
    chat_template: str | None = None

    def __call__(self, text, return_tensors):
        ids = torch.tensor([[ord(character) % VOCAB_SIZE for character in text]])
        return LettersEncoding({"input_ids": ids, "attention_mask": torch.ones_like(ids)})

    def decode(self, token_ids, skip_special_tokens=False):
        return "".join(self.texts.get(token, chr(token)) for token in token_ids)


class LettersEncoding(dict):
    def to(self, device):
        return self


@pytest.fixture(scope="module")
def loaded():
    model = hf_ddtree.enable(tiny_model("llama"))
    return Loaded(model, Letters(), {DRAFTER: tiny_dflash_drafter(model), PROMPT_LOOKUP: None})


def ask(text=REPETITIVE, **options):
    return Request([{"role": "user", "content": text}], **{"max_new_tokens": 24, "tree_budget": 8, **options})


def finish(loaded, request, switch=None):
    *_, last = compare(loaded, request, switch or StopSwitch())
    return last


# runs


@pytest.mark.parametrize("drafter", [DRAFTER, PROMPT_LOOKUP])
@pytest.mark.parametrize("sampling", [None, Sampling(seed=3)], ids=["greedy", "sampled"])
def test_both_runs_give_what_generate_gives(loaded, drafter, sampling):
    request = ask(drafter=drafter, sampling=sampling, repetition_penalty=1.1)
    outcome = finish(loaded, request)
    inputs = request.inputs(loaded)
    torch.manual_seed(3)
    expected = loaded.model.generate(**inputs, **request.settings()).sequences[0, inputs["input_ids"].shape[1] :]
    assert outcome.plain.token_ids == outcome.drafted.token_ids == expected.tolist()
    assert outcome.verdict.kind == "identical"
    assert "24" in outcome.verdict.text
    assert outcome.plain.finished and outcome.drafted.finished
    assert 0 < outcome.plain.first_token_seconds < outcome.plain.seconds
    assert outcome.plain.rounds is None


def test_the_seed_changes_the_draw(loaded):
    texts = {tuple(finish(loaded, ask(sampling=Sampling(seed=seed))).plain.token_ids) for seed in range(4)}
    assert len(texts) > 1


def test_the_rounds_add_up_to_the_text(loaded):
    drafted = finish(loaded, ask(drafter=DRAFTER)).drafted
    tokens = drafted.token_ids[:1]
    for entry in drafted.rounds:
        assert int(entry.tree.token_ids[0]) == tokens[-1]
        tokens += entry.tree.token_ids[entry.path[1:]].tolist()
        tokens += [] if entry.bonus is None else [entry.bonus]
    assert tokens == drafted.token_ids


def test_a_kept_tree_has_no_distributions(loaded):
    sampling = Sampling(policy="hybrid", temperature=1.0)
    rounds = finish(loaded, ask(drafter=DRAFTER, sampling=sampling)).drafted.rounds
    assert rounds and not any(entry.tree.proposals for entry in rounds)


def test_the_runs_take_turns_and_grow(loaded, monkeypatch):
    monkeypatch.setattr("hf_ddtree.demo.session.REFRESH_SECONDS", 0)
    seen = list(compare(loaded, ask(), StopSwitch()))
    plain = [len(step.plain.token_ids) for step in seen if step.drafted is None]
    drafted = [len(step.drafted.token_ids) for step in seen if step.drafted is not None]
    assert plain == sorted(plain) and drafted == sorted(drafted)
    assert len(set(plain)) > 3 and len(set(drafted)) > 3
    assert all(step.plain.finished for step in seen if step.drafted is not None)


def test_what_generate_raises_arrives(loaded):
    broken = replace(loaded, drafters={PROMPT_LOOKUP: "no drafter"})
    with pytest.raises(ValueError, match="is no drafter"):
        finish(broken, ask())


# stopping


@pytest.mark.parametrize("during", ["plain", "drafted"])
def test_stop_ends_the_run_at_once(loaded, during, monkeypatch):
    monkeypatch.setattr("hf_ddtree.demo.session.REFRESH_SECONDS", 0)
    switch = StopSwitch()
    for step in compare(loaded, ask(max_new_tokens=300), switch):
        run = step.plain if during == "plain" else step.drafted
        if run is not None and len(run.token_ids) >= 5:
            switch.pressed = True
    stopped, other = (step.plain, step.drafted) if during == "plain" else (step.drafted, step.plain)
    assert 5 <= len(stopped.token_ids) < 300
    assert len(other.token_ids) == (0 if during == "plain" else 300)
    assert step.verdict.kind == "stopped"


def test_a_stopped_run_can_be_followed_by_another(loaded):
    switch = StopSwitch(pressed=True)
    assert len(finish(loaded, ask(), switch).plain.token_ids) <= 1
    assert finish(loaded, ask(), StopSwitch()).verdict.kind == "identical"


def test_the_generation_ends_where_nobody_watches(loaded, monkeypatch):
    monkeypatch.setattr("hf_ddtree.demo.session.REFRESH_SECONDS", 0)
    switch = StopSwitch()
    steps = compare(loaded, ask(max_new_tokens=400), switch)
    next(steps)
    steps.close()  # waits for the thread
    assert switch.pressed


# requests


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"text": " \n"}, "prompt is empty"),
        ({"text": "a" * (MAX_PROMPT_CHARACTERS + 1)}, "prompt has 4001 characters"),
        ({"max_new_tokens": 0}, "max new tokens"),
        ({"max_new_tokens": MAX_NEW_TOKENS + 1}, "max new tokens"),
        ({"tree_budget": 0}, "budget"),
        ({"repetition_penalty": math.nan}, "repetition penalty"),
    ],
)
def test_requests_out_of_bounds_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ask(**options)


@pytest.mark.parametrize(
    "option", [{"temperature": 0}, {"top_p": 0}, {"top_k": -1}, {"seed": None}, {"seed": 2**32}, {"policy": "magic"}]
)
def test_sampling_out_of_bounds_is_refused(option):
    with pytest.raises(ValueError, match=next(iter(option)).replace("_", "-")):
        Sampling(**option)


@pytest.mark.parametrize("positions", [None, 512])
def test_long_conversations_are_refused(loaded, positions):
    config = SimpleNamespace(get_text_config=lambda decoder: SimpleNamespace(max_position_embeddings=positions))
    model = SimpleNamespace(config=config, device="cpu")
    most = MAX_PROMPT_TOKENS if positions is None else positions - 24
    loaded = replace(loaded, model=model)
    assert ask("a" * most).inputs(loaded)["input_ids"].shape[1] == most
    with pytest.raises(ValueError, match="Start a new one"):
        ask("a" * (most + 1)).inputs(loaded)


def test_the_history_is_part_of_the_prompt(loaded):
    messages = [
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d"},
    ]
    ids = Request(messages).inputs(loaded)["input_ids"][0].tolist()
    assert ids == [ord(character) for character in "ab\nc\nd"]


def test_prompt_lookup_always_samples_by_the_policy_target():
    assert ask(sampling=Sampling(policy="swor")).policy == "target"
    assert ask(drafter=DRAFTER, sampling=Sampling(policy="swor")).policy == "swor"
    assert ask().policy is None


def test_an_unknown_dtype_is_refused():
    with pytest.raises(ValueError, match="float8"):
        Models().get("float8")


# verdicts


def verdict_on(loaded, drafted_change, request=None, stopped=False):
    """The verdict where the drafted text is changed: `drafted_change(tokens)`."""
    request = request or ask()
    plain = finish(loaded, request).plain.token_ids
    prompt_ids = request.inputs(loaded)["input_ids"]
    return judge(loaded, request, prompt_ids, plain, drafted_change(list(plain)), stopped)


def test_policies_other_than_target_are_two_draws(loaded):
    outcome = finish(loaded, ask(drafter=DRAFTER, sampling=Sampling(policy="hybrid")))
    assert outcome.verdict.kind == "same distribution"
    assert "“hybrid”" in outcome.verdict.text


def test_a_real_difference_is_called_different(loaded):
    def change(tokens):
        tokens[7] = (tokens[7] + 1) % VOCAB_SIZE
        return tokens

    verdict = verdict_on(loaded, change)
    assert verdict.kind == "different"
    assert "Token 8 differs" in verdict.text and "top-1 and top-2" in verdict.text


@pytest.mark.parametrize("drafted_change", [lambda tokens: tokens[:-1], lambda tokens: [*tokens, 5]])
def test_a_text_that_ends_elsewhere_is_different(loaded, drafted_change):
    assert verdict_on(loaded, drafted_change).kind == "different"


def test_a_stopped_text_is_compared_as_far_as_it_goes(loaded):
    verdict = verdict_on(loaded, lambda tokens: tokens[:5], stopped=True)
    assert verdict.kind == "stopped" and "5 tokens" in verdict.text
    assert verdict_on(loaded, lambda tokens: [tokens[0] + 1], stopped=True).kind == "different"


def test_a_near_tie_is_shown_with_its_gap(loaded):
    """Two tokens are tied: the head has the same row for both."""
    model = tiny_model("llama")
    plain = loaded.model.generate(torch.tensor([[5]]), max_new_tokens=1, do_sample=False)[0, -1].item()
    model.lm_head.weight.data[plain + 1] = model.lm_head.weight.data[plain] * (1 - 1e-8)
    tied = replace(loaded, model=hf_ddtree.enable(model))
    verdict = judge(tied, ask("\x05"), torch.tensor([[5]]), [plain], [plain + 1], stopped=False)
    assert verdict.kind == "near-tie"
    assert "top-1 and top-2 scores are 0 apart" in verdict.text


def test_a_sampled_difference_says_that_rounding_moves_draws(loaded):
    request = ask(sampling=Sampling(seed=1))
    verdict = verdict_on(loaded, lambda tokens: [*tokens[:3], (tokens[3] + 1) % VOCAB_SIZE], request)
    assert verdict.kind == "different"  # in float32 it would be a bug
    assert "Token 4 differs" in verdict.text


# pictures


def picture(tree, path, tokenizer=None, bonus=None):
    return ElementTree.fromstring(tree_svg(tree, path, tokenizer or Letters(), bonus))


def nodes_of(svg, kind):
    return [group for group in svg.iter(f"{SVG}g") if group.get("class") == f"node {kind}"]


def random_tree(draw, most=12):
    n_nodes = draw(st.integers(0, most))
    parents = [-1] + [draw(st.integers(0, node)) for node in range(n_nodes)]
    return DraftTree.from_lists(list(range(n_nodes + 1)), parents)


@st.composite
def hostile_rounds(draw):
    tree = random_tree(draw)
    pieces = st.text(max_size=6) | st.sampled_from([HOSTILE, "]]>", "<!--", "\x1b[2J", "&#x3c;", "<svg/onload=x>", ""])
    texts = {token: draw(pieces) for token in range(len(tree) + 1)}
    path = [0]
    while (children := (tree.parents == path[-1]).nonzero().flatten().tolist()) and draw(st.booleans()):
        path.append(draw(st.sampled_from(children)))
    return tree, path, Letters(texts)


@given(hostile_rounds(), st.booleans())
def test_hostile_tokens_stay_text(a_round, with_bonus):
    tree, path, tokenizer = a_round
    svg = tree_svg(tree, path, tokenizer, len(tree) if with_bonus else None)
    root = ElementTree.fromstring(svg)
    elements = [element.tag.removeprefix(SVG) for element in root.iter()]
    assert set(elements) <= {"svg", "g", "title", "rect", "text", "path"}
    n_boxes = len(tree) + with_bonus
    assert elements.count("g") == elements.count("title") == elements.count("text") == n_boxes
    assert elements.count("path") == n_boxes - 1
    drawn = {name for element in root.iter() for name in element.attrib}
    assert not [name for name in drawn if name.startswith("on") or "href" in name]
    assert all(character.isprintable() for character in svg)
    assert not set("${}`") & set(svg)


def test_the_accepted_path_is_highlighted():
    tree = DraftTree.from_lists([65, 66, 67, 68, 69], [-1, 0, 0, 2, 2])
    svg = picture(tree, [0, 2, 3], bonus=70)
    labels = {
        kind: ["".join(g.itertext()) for g in nodes_of(svg, kind)] for kind in ("root", "accepted", "rejected", "bonus")
    }
    assert [len(texts) for texts in labels.values()] == [1, 2, 2, 1]
    assert all(letter in text for letter, text in zip("CD", labels["accepted"]))
    assert all(letter in text for letter, text in zip("BE", labels["rejected"]))
    assert "F" in labels["bonus"][0]


def test_nodes_do_not_overlap():
    tree = DraftTree.from_lists(list(range(65, 75)), [-1, 0, 0, 1, 1, 2, 2, 2, 4, 7])
    boxes = [
        (float(r.get("x")), float(r.get("y"))) for r in picture(tree, [0, 1], bonus=80).iter(f"{SVG}rect") if r.get("x")
    ]
    assert len(boxes) == len(set(boxes)) == 11
    depths = sorted(x for x, _ in boxes)
    assert depths.count(depths[0]) == 1  # the root's column is its own


@pytest.mark.parametrize("with_probabilities", [True, False])
def test_the_draft_probability_is_shown_where_there_is_one(with_probabilities):
    log_reach = [0.0, math.log(0.62), math.log(0.004)] if with_probabilities else None
    tree = DraftTree.from_lists([65, 66, 67], [-1, 0, 1], log_reach=log_reach)
    text = "".join(picture(tree, [0]).itertext())
    assert ("62%" in text and "<1%" in text) == with_probabilities
    assert "100%" not in text


def test_large_trees_are_summarised():
    n_nodes = 300
    parents = [-1] + [node // 3 for node in range(n_nodes)]
    tree = DraftTree.from_lists([65] * (n_nodes + 1), parents)
    path = [0, 1, 3 * 1 + 1, 3 * 4 + 1, 3 * 13 + 1, 3 * 40 + 1]
    svg = picture(tree, path)
    shown = list(svg.iter(f"{SVG}g"))
    assert 50 < len(shown) <= 65
    assert len(nodes_of(svg, "accepted")) == len(path) - 1
    left_out = [int(text.text) for text in svg.iter(f"{SVG}text") if text.text.startswith("+")]
    assert len(shown) + sum(left_out) == len(tree)


def test_a_tree_of_the_root_alone_can_be_drawn():
    assert len(nodes_of(picture(DraftTree.from_lists([65], [-1]), [0], bonus=66), "bonus")) == 1


# text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (" the\n", "␣the⏎"),
        ("\x1b[0m\x07", "\\x1b[0m\\x07"),
        ("a\u202eb", "a\\u202eb"),
        ("\U000e0041", "\\U000e0041"),
        ("\u0301", "◌\u0301"),
        ("שלום🙂", "שלום🙂"),
    ],
)
def test_what_cannot_be_seen_is_made_visible(text, shown):
    assert visible(text) == shown


@given(st.text())
def test_visible_text_is_printable(text):
    assert visible(text).isprintable()


@given(st.text(), st.integers(1, 12))
def test_short_text_is_short(text, columns):
    short = shorten(visible(text), columns)
    assert width(short) <= columns
    assert short == visible(text) or short.endswith("…")


def test_everything_said_about_hostile_text_is_escaped(loaded):
    hostile = replace(loaded, tokenizer=Letters({token: HOSTILE for token in range(VOCAB_SIZE)}))
    request = ask(drafter=DRAFTER)
    outcome = finish(hostile, request)
    html = conversation_html([{"role": "user", "content": HOSTILE}, {"role": "assistant", "content": HOSTILE}])
    html += stats_html(outcome.drafted, request) + verdict_html(outcome)
    html += round_html(outcome.drafted.rounds, 1, outcome.drafted.token_ids, hostile.tokenizer)
    html += verdict_html(replace(outcome, verdict=verdict_on(hostile, lambda tokens: [tokens[0] + 1, *tokens[1:]])))
    assert "alert" in html
    assert "<script" not in html and "${" not in html and "{{" not in html


def test_escaped_text_reads_as_it_was():
    assert "".join(ElementTree.fromstring(f"<p>{escape('a${b}`<&')}</p>").itertext()) == "a${b}`<&"


# figures


def test_the_figures_of_a_run(loaded):
    request = ask(drafter=DRAFTER)
    drafted = finish(loaded, request).drafted
    n_rounds = len(drafted.rounds)
    per_round = sum(len(entry.path) for entry in drafted.rounds) / n_rounds
    nodes = sum(len(entry.tree) - 1 for entry in drafted.rounds) / n_rounds
    text = "".join(ElementTree.fromstring(stats_html(drafted, request)).itertext())
    for figure in (f"tokens24rounds{n_rounds}", f"tokens_per_round{per_round:.2f}", f"budget used{nodes:.1f} of 8"):
        assert figure in text
    plain = stats_html(replace(drafted, rounds=None), request)
    assert "rounds" not in plain and "tokens/s" in plain


def test_the_verdict_gives_the_ratio_of_the_speeds(loaded):
    outcome = finish(loaded, ask())
    outcome = replace(outcome, plain=replace(outcome.plain, seconds=3.0), drafted=replace(outcome.drafted, seconds=2.0))
    assert "1.50×" in verdict_html(outcome)


def test_the_telling_round_kept_and_rejected():
    chain = DraftedRound(DraftTree.from_lists([1, 2, 3], [-1, 0, 1]), [0, 1, 2], None)
    fork = DraftedRound(DraftTree.from_lists([1, 2, 3], [-1, 0, 0]), [0, 1], None)
    vain = DraftedRound(fork.tree, [0], None)
    assert telling_round([chain, vain, fork, vain]) == 3
    assert telling_round([replace(chain, path=[0, 1, 2]), chain]) == 1


def test_slow_trees_are_called_slow(loaded):
    outcome = finish(loaded, ask())
    slow = replace(outcome, plain=replace(outcome.plain, seconds=1.0), drafted=replace(outcome.drafted, seconds=2.0))
    assert "did not pay" in verdict_html(slow)
    assert "did not pay" not in verdict_html(replace(slow, plain=replace(slow.plain, seconds=3.0)))


@pytest.mark.parametrize("drafter", [DRAFTER, PROMPT_LOOKUP])
def test_any_model_can_be_shown(drafter, tmp_path):
    """A checkpoint by path, with a drafter by path; another dtype is another copy."""
    model = tiny_model("llama", vocab_size=1024)
    model.save_pretrained(tmp_path / "model")
    tiny_dflash_drafter(model).save_pretrained(tmp_path / "drafter")
    tokenizer = Tokenizer(WordLevel({"a": 5, "b": 6, "?": 7}, unk_token="?"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path / "model")
    models = Models(str(tmp_path / "model"), str(tmp_path / "drafter"))
    loaded = models.get("float32")
    assert finish(loaded, ask("a b a b", drafter=drafter)).verdict.kind == "identical"
    assert models.get("float32") is loaded
    assert models.get("bfloat16").model.dtype == models.loaded.drafters[DRAFTER].dtype == torch.bfloat16
    assert models.drafter_label.endswith("drafter")
