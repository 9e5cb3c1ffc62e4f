"""The HTML of figures, verdicts and rounds."""

from dataclasses import replace
from xml.etree import ElementTree

import pytest
from demo.support import HOSTILE, Letters, ask, finish

from hf_ddtree import DraftTree
from hf_ddtree.demo import DRAFTER, Comparison, DraftedRound, Run
from hf_ddtree.demo.present import conversation_html, message_html, round_html, stats_html, verdict_html
from hf_ddtree.demo.verdict import judge
from hf_ddtree.testing import VOCAB_SIZE


def test_every_function_escapes_hostile_text(loaded):
    hostile = replace(loaded, tokenizer=Letters({token: HOSTILE for token in range(VOCAB_SIZE)}))
    form = ask(drafter=DRAFTER)
    comparison = finish(hostile, form)
    plain, drafted = comparison.plain.token_ids, comparison.drafted
    different = judge(hostile, form, form.inputs(hostile)["input_ids"], plain, [plain[0] + 1, *plain[1:]], False)
    assert different.kind == "different"
    html = conversation_html([{"role": "user", "content": HOSTILE}, {"role": "assistant", "content": HOSTILE}])
    html += stats_html(drafted, form) + verdict_html(comparison)
    html += round_html(drafted.rounds, 1, drafted.token_ids, hostile.tokenizer)
    html += verdict_html(replace(comparison, verdict=different)) + message_html(HOSTILE)
    assert "alert" in html
    assert "<script" not in html and "${" not in html and "{{" not in html


def test_stats_html_shows_the_figures_of_a_run(loaded):
    form = ask(drafter=DRAFTER)
    drafted = finish(loaded, form).drafted
    n_rounds = len(drafted.rounds)
    per_round = sum(len(entry.path) for entry in drafted.rounds) / n_rounds
    nodes = sum(len(entry.tree) - 1 for entry in drafted.rounds) / n_rounds
    text = "".join(ElementTree.fromstring(stats_html(drafted, form)).itertext())
    expected = (f"tokens24rounds{n_rounds}", f"tokens_per_round{per_round:.2f}", f"tree budget used{nodes:.1f} of 8")
    for figure in expected:
        assert figure in text
    plain = stats_html(replace(drafted, rounds=None), form)
    assert "rounds" not in plain and "tokens/s" in plain


@pytest.mark.parametrize("run", [None, Run()])
def test_stats_html_shows_no_figures_before_the_first_token(run):
    text = "".join(ElementTree.fromstring(stats_html(run, ask())).itertext())
    assert text == "tokens/s–first token–tokens–"


def test_verdict_html_says_which_run_is_in_progress():
    assert "Running plain generation" in verdict_html(Comparison(Run()))
    assert "Running DDTree" in verdict_html(Comparison(Run(), Run()))


def timed(comparison, plain, drafted):
    """Return the comparison as if its runs had taken these seconds."""
    return replace(
        comparison,
        plain=replace(comparison.plain, seconds=plain),
        drafted=replace(comparison.drafted, seconds=drafted),
    )


def test_verdict_html_gives_the_ratio_of_the_speeds(loaded):
    comparison = finish(loaded, ask())
    assert "1.50×" in verdict_html(timed(comparison, 3.0, 2.0))


def test_verdict_html_says_when_ddtree_was_slower(loaded):
    comparison = finish(loaded, ask())
    assert "slower" in verdict_html(timed(comparison, 1.0, 2.0))
    assert "slower" not in verdict_html(timed(comparison, 3.0, 2.0))


def test_round_html_counts_nodes_and_shows_the_text_before():
    first = DraftedRound(DraftTree.from_lists([97, 98, 120], [-1, 0, 0]), [0, 1], 99)
    last = DraftedRound(DraftTree.from_lists([99, 100], [-1, 0]), [0, 1], None)
    tokens = [97, 98, 99, 100]
    html = round_html([first, last], 1, tokens, Letters())
    assert "Round 1 of 2: the target accepted 1 of 2 drafted nodes and then chose one more token itself." in html
    assert "… a</p>" in html
    html = round_html([first, last], 2, tokens, Letters())
    assert "Round 2 of 2: the target accepted 1 of 1 drafted nodes. The text ends here." in html
    assert "… abc</p>" in html


@pytest.mark.parametrize(("n_nodes", "said"), [(64, False), (65, True)])
def test_round_html_says_when_nodes_are_not_drawn(n_nodes, said):
    tree = DraftTree.from_lists([97] * (n_nodes + 1), [-1] + [0] * n_nodes)
    assert ("not drawn" in round_html([DraftedRound(tree, [0], None)], 1, [97], Letters())) == said
