"""The page's components and handlers, without a browser. tests/test_browser.py drives the page in one."""

import runpy
from dataclasses import replace
from types import SimpleNamespace

import pytest
from demo.support import REPETITIVE, Letters
from helpers import ROOT

import hf_ddtree
from hf_ddtree.demo import DRAFTER, PROMPT_LOOKUP, Form, Loaded, StopSwitch
from hf_ddtree.testing import tiny_dflash_drafter, tiny_model

gr = pytest.importorskip("gradio", reason="needs gradio, which `make test` installs")


@pytest.fixture(scope="module")
def app():
    """The names of app.py."""
    return SimpleNamespace(**runpy.run_path(str(ROOT / "app.py")))


@pytest.fixture
def models():
    """A stand-in for `Models` that has a tiny target and drafter, and takes every dtype."""
    model = hf_ddtree.enable(tiny_model("llama"))
    loaded = Loaded(model, Letters(), {DRAFTER: tiny_dflash_drafter(model), PROMPT_LOOKUP: None})
    return SimpleNamespace(get=lambda dtype: loaded, tokenizer=loaded.tokenizer, drafter_label="tiny")


@pytest.fixture(params=[False, True], ids=["greedy", "sampled"])
def tab(app, models, request):
    with gr.Blocks():
        return app.Tab(models, "float32", sampled=request.param)


def values_of(tab, prompt, history=()):
    """Return what the components hold: the initial values, apart from the prompt and the length."""
    values = {control: control.value for control in tab.controls.values()}
    values |= {tab.controls["max_new_tokens"]: 24, tab.prompt: prompt}
    return {**values, tab.history: list(history), tab.switch: StopSwitch()}


def last_values(updates):
    """Return the last value of each component."""
    seen = {}
    for update in updates:
        seen |= update
    return seen


def test_create_controls_gives_the_fields_of_a_form(tab):
    form = Form.from_controls([{"role": "user", "content": "hello"}], {k: c.value for k, c in tab.controls.items()})
    assert (form.drafter, form.tree_budget, form.max_new_tokens) == (DRAFTER, 16, 128)
    assert (form.policy == "target") == ("policy" in tab.controls)


def test_start_over_shows_both_texts_and_a_tree(tab):
    seen = last_values(tab.start_over(values_of(tab, REPETITIVE)))
    assert seen[tab.plain] == seen[tab.drafted] != ""
    assert "Identical." in seen[tab.verdict]
    assert seen[tab.trees]["visible"] and "<svg" in seen[tab.picture]
    assert not seen[tab.conversation]["visible"]
    assert [message["role"] for message in seen[tab.history]] == ["user", "assistant"]


def test_go_on_continues_the_conversation(tab):
    history = [{"role": "user", "content": "first"}, {"role": "assistant", "content": "answer"}]
    seen = last_values(tab.go_on(values_of(tab, "second", history)))
    assert seen[tab.conversation]["visible"] and "answer" in seen[tab.conversation]["value"]
    assert [message["content"] for message in seen[tab.history]][:3] == ["first", "answer", "second"]


def test_answer_explains_mistakes_on_the_page(tab):
    seen = last_values(tab.start_over(values_of(tab, " ")))
    assert "The prompt is empty" in seen[tab.verdict] and "bad" in seen[tab.verdict]


def test_answer_reports_errors_on_the_page_and_in_the_log(tab, caplog):
    def fail(dtype):
        raise RuntimeError("<b>out of memory</b>")

    tab.models.get = fail
    seen = last_values(tab.start_over(values_of(tab, REPETITIVE)))
    assert "RuntimeError: &lt;b&gt;out of memory" in seen[tab.verdict]
    assert "Traceback" in caplog.text


def test_draw_shows_a_round_that_exists(tab):
    comparison = last_values(tab.start_over(values_of(tab, REPETITIVE)))[tab.outcome]
    n_rounds = len(comparison.drafted.rounds)
    assert f"Round {n_rounds} of {n_rounds}" in tab.draw(n_rounds + 1, comparison)
    assert tab.draw(1, None) == tab.draw(1, replace(comparison, drafted=None)) == ""


def test_text_leaves_out_an_incomplete_character(tab):
    run = last_values(tab.start_over(values_of(tab, REPETITIVE)))[tab.outcome].plain
    assert tab.text(replace(run, token_ids=[97, 0xFFFD])) == "a"


def test_parse_uses_the_embedded_model_by_default(app):
    assert vars(app.parse([])) == {"model": "embedded", "assistant_model": None, "port": 7860}
    args = app.parse(["--model", "M", "--assistant-model", "D", "--port", "1"])
    assert vars(args) == {"model": "M", "assistant_model": "D", "port": 1}
