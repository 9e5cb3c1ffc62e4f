"""A Gradio page that runs plain generation and DDTree on the same prompt and shows the draft tree of every round.

Examples:

    python app.py                                          # the embedded model
    python app.py --model PATH --assistant-model PATH      # any other target and drafter
"""

# This file contains the components and their events. The logic behind them is in hf_ddtree.demo.

import argparse
import logging
from collections.abc import Iterator
from typing import Any

import gradio as gr
import torch

from hf_ddtree.demo import DRAFTER, Comparison, Form, Models, Run, StopSwitch, compare, present
from hf_ddtree.demo.form import MAX_NEW_TOKENS, MAX_PROMPT_CHARACTERS
from hf_ddtree.demo.models import DTYPES
from hf_ddtree.demo.prompts import EXAMPLES
from hf_ddtree.demo.rounds import telling_round
from hf_ddtree.demo.style import STYLE_SHEET
from hf_ddtree.embedded import EMBEDDED
from hf_ddtree.sampling.policies import POLICIES

logger = logging.getLogger(__name__)
MAX_SLIDER_BUDGET = 256  # on a CPU the best tree budgets are far smaller
MAX_QUEUE_SIZE = 16
INTRODUCTION = """# The same text in fewer steps

A language model, the *target*, writes one token per step. With **DDTree**, a small *drafter* proposes a whole tree of
possible continuations. The target verifies the tree in a single step and keeps the tokens that it would have written
itself. The text stays the same, but it takes fewer steps. Press **Run** to compare: plain generation runs first and
DDTree runs second, so they do not compete for the same CPU cores.
"""
CONTROL: dict[str, Any] = {"min_width": 260}  # puts one control in each row on a telephone
# events must not cover the growing texts with a progress bar, and are no part of the page's public API
EVENT: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
Updates = dict[Any, Any]  # from a component to its new value


class Tab:
    """One tab: its components, and what they do.

    Args:
        models: generates, one run at a time over all tabs and visitors.
        dtype: the dtype that is selected at first.
        sampled: whether the tab samples; otherwise it decodes greedily.
    """

    def __init__(self, models: Models, dtype: str, sampled: bool) -> None:
        self.models = models
        self.switch, self.history = gr.State(StopSwitch()), gr.State([])
        self.outcome = gr.State(None)  # the last comparison, whose trees the slider shows
        self.prompt = gr.Textbox(
            next(iter(EXAMPLES.values())), label="Prompt", lines=3, max_lines=8, max_length=MAX_PROMPT_CHARACTERS
        )
        gr.Examples([[text] for text in EXAMPLES.values()], self.prompt, example_labels=list(EXAMPLES))
        self.controls = create_controls(models, dtype, sampled)
        with gr.Row(elem_classes="buttons"):
            self.run = gr.Button("Run", variant="primary", min_width=90)
            self.follow_up = gr.Button("Follow up", interactive=False, min_width=90)
            self.stop = gr.Button("Stop", variant="stop", interactive=False, min_width=90)
        self.conversation = gr.HTML(js_on_load=None, visible=False)
        with gr.Row():
            self.plain, self.plain_stats = create_answer("Plain generation")
            self.drafted, self.drafted_stats = create_answer("DDTree")
        self.verdict = gr.HTML(js_on_load=None)
        with gr.Column(visible=False) as self.trees:
            self.round = gr.Slider(1, 2, 1, step=1, precision=0, label="Tree of round", buttons=[])
            self.picture = gr.HTML(js_on_load=None)
            gr.HTML(present.LEGEND, js_on_load=None)
        self._connect()

    def _connect(self) -> None:
        """Connect the buttons and the slider to the methods below."""
        buttons = [self.run, self.follow_up, self.stop]
        shown = [self.plain, self.drafted, self.plain_stats, self.drafted_stats, self.verdict]
        outputs = [self.conversation, *shown, self.trees, self.round, self.picture, self.history, self.outcome]
        inputs = {self.switch, self.history, self.prompt, *self.controls.values()}
        for button, answer in ((self.run, self.start_over), (self.follow_up, self.go_on)):
            # `begin` does not wait in the queue, so Stop works at once, even during another visitor's run
            begun = button.click(self.begin, self.switch, [*buttons, self.verdict], queue=False, **EVENT)
            answered = begun.then(answer, inputs, outputs, concurrency_id="generation", concurrency_limit=1, **EVENT)
            answered.then(self.end, self.history, buttons, queue=False, **EVENT)
        self.stop.click(self.press_stop, self.switch, self.stop, queue=False, **EVENT)
        self.round.change(self.draw, [self.round, self.outcome], self.picture, trigger_mode="always_last", **EVENT)

    def begin(self, switch: StopSwitch) -> tuple[Any, ...]:
        """Handle a click on Run or Follow up: release the switch, enable Stop and say that the run waits."""
        switch.pressed = False
        waiting = present.message_html("Waiting in the queue. The server handles one run at a time …")
        return gr.update(interactive=False), gr.update(interactive=False), gr.update(interactive=True), waiting

    def end(self, history: list[dict[str, str]]) -> tuple[Any, ...]:
        """Enable and disable the buttons after a run, even after an error."""
        return gr.update(interactive=True), gr.update(interactive=bool(history)), gr.update(interactive=False)

    def press_stop(self, switch: StopSwitch) -> Any:
        """Handle a click on Stop."""
        switch.pressed = True
        return gr.update(interactive=False)

    def start_over(self, values: Updates) -> Iterator[Updates]:
        """Answer the prompt alone."""
        yield from self.answer([], values)

    def go_on(self, values: Updates) -> Iterator[Updates]:
        """Answer the prompt as the next message of the conversation."""
        yield from self.answer(values[self.history], values)

    def answer(self, history: list[dict[str, str]], values: Updates) -> Iterator[Updates]:
        """Run plain generation and DDTree, and yield the components that change. Errors become messages on the page."""
        messages = [*history, {"role": "user", "content": values[self.prompt]}]
        yield self.clear(messages)
        try:
            chosen = {name: values[control] for name, control in self.controls.items()}
            loaded, form = self.models.get(chosen["dtype"]), Form.from_controls(messages, chosen)
            for comparison in compare(loaded, form, values[self.switch]):
                yield self.show(comparison, form)
            yield self.finish(comparison, messages)
        except ValueError as error:
            yield {self.verdict: present.message_html(str(error), mood="bad")}
        except Exception as error:  # the page must keep working for the next run
            logger.exception("generation failed")
            message = f"Generation failed with {type(error).__name__}: {error} The log of app.py has the details."
            yield {self.verdict: present.message_html(message, mood="bad")}

    def clear(self, messages: list[dict[str, str]]) -> Updates:
        """Return the page at the start of a run, with the conversation if there is one."""
        conversation = gr.update(value=present.conversation_html(messages), visible=len(messages) > 1)
        empty = dict.fromkeys([self.plain, self.drafted, self.plain_stats, self.drafted_stats], "")
        loading = present.message_html("Loading the model …")
        return {self.conversation: conversation, **empty, self.verdict: loading, self.trees: gr.update(visible=False)}

    def show(self, comparison: Comparison, form: Form) -> Updates:
        """Return the texts and figures so far."""
        plain, drafted = comparison.plain, comparison.drafted
        return {
            self.plain: self.text(plain),
            self.drafted: self.text(drafted),
            self.plain_stats: present.stats_html(plain, form),
            self.drafted_stats: present.stats_html(drafted, form),
            self.verdict: present.verdict_html(comparison),
        }

    def finish(self, comparison: Comparison, messages: list[dict[str, str]]) -> Updates:
        """Return the most telling tree, and the conversation for Follow up, which goes on from the plain answer."""
        answer = {"role": "assistant", "content": self.text(comparison.plain)}
        updates = {self.history: [*messages, answer], self.outcome: comparison}
        if comparison.drafted is None or not comparison.drafted.rounds:
            return updates
        rounds = comparison.drafted.rounds
        number = telling_round(rounds)
        return {
            **updates,
            self.trees: gr.update(visible=True),
            self.round: gr.update(value=number, maximum=max(2, len(rounds))),  # a slider needs two different ends
            self.picture: self.draw(number, comparison),
        }

    def text(self, run: Run | None) -> str:
        """Return the text of a run without an incomplete character at its end."""
        if run is None:
            return ""
        return self.models.tokenizer.decode(run.token_ids, skip_special_tokens=True).rstrip("\ufffd")

    def draw(self, number: int, outcome: Comparison | None) -> str:
        """Return the tree of round `number`, counted from 1."""
        if outcome is None or outcome.drafted is None or not outcome.drafted.rounds:
            return ""
        rounds, tokens = outcome.drafted.rounds, outcome.drafted.token_ids
        return present.round_html(rounds, min(number, len(rounds)), tokens, self.models.tokenizer)


def create_controls(models: Models, dtype: str, sampled: bool) -> dict[str, Any]:
    """Create the settings of a tab. Their names are those that `Form.from_controls` takes, and "dtype"."""
    controls = _main_controls(models, dtype) | (_sampling_controls() if sampled else {})
    with gr.Accordion("More settings", open=False), gr.Row():
        return controls | _more_controls(dtype) | (_truncation_controls() if sampled else {})


def _main_controls(models: Models, dtype: str) -> dict[str, Any]:
    names = list(models.get(dtype).drafters)
    drafters = [(models.drafter_label if name == DRAFTER else name, name) for name in names]
    budget, tokens = "Tree budget (nodes)", "Max new tokens"
    with gr.Row():
        return {
            "drafter": gr.Radio(drafters, value=names[0], label="Drafter", **CONTROL),
            "tree_budget": gr.Slider(1, MAX_SLIDER_BUDGET, 16, step=1, precision=0, label=budget, **CONTROL),
            "max_new_tokens": gr.Slider(8, MAX_NEW_TOKENS, 128, step=1, precision=0, label=tokens, **CONTROL),
        }


def _more_controls(dtype: str) -> dict[str, Any]:
    return {
        "auto_budget": gr.Checkbox(False, label="Automatic tree budget (as many nodes as pay off)"),
        "dtype": gr.Radio(list(DTYPES), value=dtype, label="dtype"),
        "repetition_penalty": gr.Slider(0.8, 1.5, 1.0, step=0.05, label="Repetition penalty"),
    }


def _sampling_controls() -> dict[str, Any]:
    policies, note = list(POLICIES), "Prompt look-up always uses target."
    with gr.Row():
        return {
            "policy": gr.Radio(policies, value="target", label="Sampling policy", info=note, **CONTROL),
            "temperature": gr.Slider(0.1, 2, 0.7, step=0.05, label="Temperature", **CONTROL),
            "seed": gr.Number(0, precision=0, minimum=0, maximum=2**32 - 1, label="Seed", **CONTROL),
        }


def _truncation_controls() -> dict[str, Any]:
    return {
        "top_p": gr.Slider(0.05, 1, 0.95, step=0.01, label="Top-p"),
        "top_k": gr.Slider(0, 200, 50, step=1, precision=0, label="Top-k (0 keeps all tokens)"),
    }


def create_answer(label: str) -> tuple[gr.Textbox, gr.HTML]:
    """Create the box of a text and the figures below it."""
    with gr.Column(min_width=300):
        return gr.Textbox(label=label, lines=12, max_lines=12, interactive=False), gr.HTML(js_on_load=None)


def build_page(models: Models) -> gr.Blocks:
    """Load the models and return the page."""
    dtype = "bfloat16" if torch.accelerator.is_available() else "float32"
    models.get(dtype)
    with gr.Blocks(title="hf_ddtree", analytics_enabled=False) as page:
        gr.Markdown(INTRODUCTION)
        for name in ("Greedy", "Sampled"):
            with gr.Tab(name):
                Tab(models, dtype, sampled=name == "Sampled")
    return page.queue(max_size=MAX_QUEUE_SIZE)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=EMBEDDED, help="target: a path, a Hub id, or 'embedded' (the default)")
    parser.add_argument(
        "--assistant-model",
        help="drafter: a path or a Hub id. By default the embedded model uses its own drafter, and any other model "
        "drafts by prompt look-up only.",
    )
    parser.add_argument("--port", type=int, default=7860, help="port on 127.0.0.1 (default: 7860)")
    return parser.parse_args(arguments)


def main() -> None:
    """Serve the page on this machine."""
    args = parse()
    page = build_page(Models(args.model, args.assistant_model))
    fonts = ["system-ui", "sans-serif"]  # fonts of the visitor's machine, so that nothing is loaded from elsewhere
    theme = gr.themes.Soft(font=fonts, font_mono=["ui-monospace", "monospace"], primary_hue="emerald")
    page.launch(server_port=args.port, share=False, theme=theme, css=STYLE_SHEET, footer_links=[])


if __name__ == "__main__":
    main()
