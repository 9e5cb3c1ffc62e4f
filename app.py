"""The Gradio page: plain generation and DDTree on the same prompt, side by side, and the tree of every round.

    python app.py                          # the embedded model
    python app.py --model PATH --assistant-model PATH --port 7860

Nothing but components and what connects them; the rest is in `hf_ddtree.demo`.
"""

import argparse
import logging

import gradio as gr
import torch

from hf_ddtree.demo import Models, Request, Sampling, StopSwitch, compare, present
from hf_ddtree.demo.models import DRAFTER, DTYPES, EMBEDDED
from hf_ddtree.demo.request import MAX_NEW_TOKENS, MAX_PROMPT_CHARACTERS

logger = logging.getLogger(__name__)
LARGEST_BUDGET = 256  # of the slider; on a CPU the best ones are far smaller
QUEUE_SIZE = 16
EXAMPLES = {
    "Write a function": "Write a Python function that returns the n-th Fibonacci number, and explain it.",
    "Explain": "Explain in simple words why the sky is blue.",
    "Tell a story": "Tell a short story about a lighthouse keeper and a lost whale.",
    "Add docstrings": "Add a docstring to each method of this class:\n\n```python\nclass Stack:\n    def __init__(self):\n"
    "        self.items = []\n\n    def push(self, item):\n        self.items.append(item)\n\n    def pop(self):\n"
    "        return self.items.pop()\n```",
    "Correct a text": "Correct the spelling and repeat the text: The libary opens at nine in the morning and closes at "
    "six in the evning. On Sundays the libary is closed, but the readng room stays open.",
}
INTRODUCTION = """# The same text, in fewer steps

A language model writes one token per step. **DDTree** lets a small drafter guess a whole *tree* of continuations, checks
all of them in a single step of the model, and keeps the guesses that the model would have written itself. The text does not
change; only the number of steps does. Press **Run** and watch: plain generation goes first and DDTree after it, so that
neither takes the other's cores.
"""
COLUMN = {"min_width": 260}  # of a control: one in a row on a telephone
# of events: no veil over what streams, and no place in the page's API
HIDDEN = {"show_progress": "hidden", "api_visibility": "private"}


class Tab:
    """The components of one tab, and what happens between them.

    Args:
        models: generates, one run at a time over all tabs and visitors.
        dtype: the one chosen at first.
        sampled: sample instead of decoding greedily.
    """

    def __init__(self, models: Models, dtype: str, sampled: bool):
        self.models = models
        self.switch, self.history = gr.State(StopSwitch()), gr.State([])
        self.outcome = gr.State(None)  # the last comparison, for its trees
        self.prompt = gr.Textbox(
            next(iter(EXAMPLES.values())), label="Prompt", lines=3, max_lines=8, max_length=MAX_PROMPT_CHARACTERS
        )
        gr.Examples([[text] for text in EXAMPLES.values()], self.prompt, example_labels=list(EXAMPLES))
        self.controls = self._main_controls() | (self._sampling_controls() if sampled else {})
        with gr.Accordion("More settings", open=False), gr.Row():
            self.controls |= self._more_controls(dtype) | (self._truncation_controls() if sampled else {})
        with gr.Row(elem_classes="buttons"):
            self.run = gr.Button("Run", variant="primary", min_width=90)
            self.follow_up = gr.Button("Follow up", interactive=False, min_width=90)
            self.stop = gr.Button("Stop", variant="stop", interactive=False, min_width=90)
        self.conversation = gr.HTML(js_on_load=None, visible=False)
        with gr.Row():
            self.plain, self.plain_stats = self._answer("Plain generation")
            self.drafted, self.drafted_stats = self._answer("DDTree")
        self.verdict = gr.HTML(js_on_load=None)
        with gr.Column(visible=False) as self.trees:
            self.round = gr.Slider(1, 2, 1, step=1, precision=0, label="Tree of round", buttons=[])
            self.picture = gr.HTML(js_on_load=None)
            gr.HTML(present.LEGEND, js_on_load=None)
        self._connect()

    def _main_controls(self) -> dict:
        names = list(self.models.loaded.drafters)
        choices = [(self.models.drafter_label if name == DRAFTER else name, name) for name in names]
        with gr.Row():
            return {
                "drafter": gr.Radio(choices, value=names[0], label="Drafter", **COLUMN),
                "tree_budget": gr.Slider(
                    1, LARGEST_BUDGET, 16, step=1, precision=0, label="Budget: nodes per round", **COLUMN
                ),
                "max_new_tokens": gr.Slider(
                    8, MAX_NEW_TOKENS, 128, step=1, precision=0, label="Max new tokens", **COLUMN
                ),
            }

    def _more_controls(self, dtype: str) -> dict:
        return {
            "auto_budget": gr.Checkbox(False, label="Budget auto: as many nodes as pay off"),
            "dtype": gr.Radio(list(DTYPES), value=dtype, label="dtype"),
            "repetition_penalty": gr.Slider(0.8, 1.5, 1.0, step=0.05, label="Repetition penalty"),
        }

    def _sampling_controls(self) -> dict:
        policies = ["target", "hybrid", "swor", "spectr"]
        with gr.Row():
            return {
                "policy": gr.Radio(
                    policies,
                    value="target",
                    label="Sampling policy",
                    info="With prompt look-up always target.",
                    **COLUMN,
                ),
                "temperature": gr.Slider(0.1, 2, 0.7, step=0.05, label="Temperature", **COLUMN),
                "seed": gr.Number(0, precision=0, minimum=0, maximum=2**32 - 1, label="Seed", **COLUMN),
            }

    def _truncation_controls(self) -> dict:
        return {
            "top_p": gr.Slider(0.05, 1, 0.95, step=0.01, label="Top-p"),
            "top_k": gr.Slider(0, 200, 50, step=1, precision=0, label="Top-k, 0 for all"),
        }

    def _answer(self, label: str) -> tuple[gr.Textbox, gr.HTML]:
        with gr.Column(min_width=300):
            return gr.Textbox(label=label, lines=12, max_lines=12, interactive=False), gr.HTML(js_on_load=None)

    def _connect(self) -> None:
        buttons = [self.run, self.follow_up, self.stop]
        shown = [self.plain, self.drafted, self.plain_stats, self.drafted_stats, self.verdict]
        outputs = [self.conversation, *shown, self.trees, self.round, self.picture, self.history, self.outcome]
        inputs = {self.switch, self.history, self.prompt, *self.controls.values()}
        for button, answer in ((self.run, self.start_over), (self.follow_up, self.go_on)):
            # at once, also while another visitor's run is under way: from here on Stop works
            begun = button.click(self.begin, self.switch, [*buttons, self.verdict], queue=False, **HIDDEN)
            answered = begun.then(answer, inputs, outputs, concurrency_id="generation", concurrency_limit=1, **HIDDEN)
            answered.then(self.end, self.history, buttons, queue=False, **HIDDEN)
        self.stop.click(self.press_stop, self.switch, self.stop, queue=False, **HIDDEN)
        self.round.change(self.draw, [self.round, self.outcome], self.picture, trigger_mode="always_last", **HIDDEN)

    def begin(self, switch: StopSwitch):
        """A click on Run or Follow up."""
        switch.pressed = False
        waiting = present.message_html("Waiting for this page's turn: one run at a time …")
        return gr.update(interactive=False), gr.update(interactive=False), gr.update(interactive=True), waiting

    def end(self, history: list[dict]):
        """After a run, however it ended."""
        return gr.update(interactive=True), gr.update(interactive=bool(history)), gr.update(interactive=False)

    def press_stop(self, switch: StopSwitch):
        """A click on Stop."""
        switch.pressed = True
        return gr.update(interactive=False)

    def start_over(self, values: dict):
        """Answer the prompt alone."""
        yield from self.answer([], values)

    def go_on(self, values: dict):
        """Answer the prompt as the next message of the conversation."""
        yield from self.answer(values[self.history], values)

    def answer(self, history: list[dict], values: dict):
        """Generate twice and show it; what goes wrong is said on the page."""
        messages = [*history, {"role": "user", "content": values[self.prompt]}]
        yield {
            self.conversation: gr.update(value=present.conversation_html(messages), visible=bool(history)),
            self.plain: "",
            self.drafted: "",
            self.plain_stats: "",
            self.drafted_stats: "",
            self.verdict: present.message_html("Loading the model …"),
            self.trees: gr.update(visible=False),
        }
        try:
            chosen = {name: values[control] for name, control in self.controls.items()}
            loaded = self.models.get(chosen.pop("dtype"))
            request = request_of(messages, **chosen)
            for comparison in compare(loaded, request, values[self.switch]):
                yield self.show(comparison, request)
            yield self.finish(comparison, messages)
        except ValueError as error:
            yield {self.verdict: present.message_html(str(error), mood="bad")}
        except Exception as error:  # the page goes on; the log says where it happened
            logger.exception("generation failed")
            message = f"Generation failed: {type(error).__name__}: {error}"
            yield {self.verdict: present.message_html(message, mood="bad")}

    def show(self, comparison, request: Request) -> dict:
        """The texts and figures so far."""
        plain, drafted = comparison.plain, comparison.drafted
        return {
            self.plain: self.text(plain),
            self.drafted: self.text(drafted),
            self.plain_stats: present.stats_html(plain, request),
            self.drafted_stats: present.stats_html(drafted, request),
            self.verdict: present.verdict_html(comparison),
        }

    def finish(self, comparison, messages: list[dict]) -> dict:
        """The most telling tree, and the conversation for the next prompt, which goes on from the plain answer."""
        answer = {"role": "assistant", "content": self.text(comparison.plain)}
        updates = {self.history: [*messages, answer], self.outcome: comparison}
        rounds = comparison.drafted.rounds
        if not rounds:
            return updates
        number = present.telling_round(rounds)
        return {
            **updates,
            self.trees: gr.update(visible=True),
            self.round: gr.update(value=number, maximum=max(2, len(rounds))),  # a slider needs two ends
            self.picture: self.draw(number, comparison),
        }

    def text(self, run) -> str:
        """The text of a run's tokens; an unfinished character at its end is left out."""
        if run is None:
            return ""
        return self.models.tokenizer.decode(run.token_ids, skip_special_tokens=True).rstrip("\ufffd")

    def draw(self, number: int, outcome) -> str:
        """The tree of a round."""
        if outcome is None or not outcome.drafted.rounds:
            return ""
        rounds = outcome.drafted.rounds
        tokenizer = self.models.tokenizer
        return present.round_html(rounds, min(number, len(rounds)), outcome.drafted.token_ids, tokenizer)


def request_of(
    messages, drafter, tree_budget, auto_budget, max_new_tokens, repetition_penalty, policy=None, **sampling
) -> Request:
    """The request for what the controls say; without a policy it is greedy."""
    return Request(
        messages,
        max_new_tokens=max_new_tokens,
        tree_budget="auto" if auto_budget else tree_budget,
        drafter=drafter,
        repetition_penalty=repetition_penalty,
        sampling=None if policy is None else Sampling(policy=policy, **sampling),
    )


def build_page(models: Models) -> gr.Blocks:
    """The page, with the model loaded."""
    dtype = "bfloat16" if torch.accelerator.is_available() else "float32"
    models.get(dtype)
    with gr.Blocks(title="hf_ddtree", analytics_enabled=False) as page:
        gr.Markdown(INTRODUCTION)
        for name in ("Greedy", "Sampled"):
            with gr.Tab(name):
                Tab(models, dtype, sampled=name == "Sampled")
    return page.queue(max_size=QUEUE_SIZE)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=EMBEDDED, help="the target: path, Hub id, or 'embedded'")
    parser.add_argument("--assistant-model", help="the drafter: path or Hub id; default: the embedded model's own")
    parser.add_argument("--port", type=int, default=7860)
    return parser.parse_args(arguments)


def main() -> None:
    """Serve the page on this machine."""
    args = parse()
    page = build_page(Models(args.model, args.assistant_model))
    fonts = ["system-ui", "sans-serif"]  # of the visitor's own machine: nothing is fetched from elsewhere
    theme = gr.themes.Soft(font=fonts, font_mono=["ui-monospace", "monospace"], primary_hue="emerald")
    page.launch(server_port=args.port, share=False, theme=theme, css=present.STYLE, footer_links=[])


if __name__ == "__main__":
    main()
