"""Answering one form twice, with plain generation and then with DDTree."""

from collections.abc import Iterator
from dataclasses import dataclass

from .form import Form
from .models import Loaded
from .run import Run, StopSwitch, stream
from .verdict import Verdict, judge


@dataclass(frozen=True)
class Comparison:
    """Both runs so far, and the verdict once they have ended."""

    plain: Run
    drafted: Run | None = None
    verdict: Verdict | None = None


def compare(loaded: Loaded, form: Form, switch: StopSwitch) -> Iterator[Comparison]:
    """Run plain generation, then DDTree, and yield the comparison several times per second.

    The runs follow each other, so they do not compete for the same CPU cores. Pressing the switch stops the current run
    and skips the next one.

    Raises:
        ValueError: if the conversation is too long.
        Exception: every exception that `generate` raises.
    """
    inputs, settings = form.inputs(loaded), form.settings()
    plain = Run()
    for plain in stream(loaded.model, switch, form.seed, **inputs, **settings):
        yield Comparison(plain)
    drafted = Run()
    if not switch.pressed:
        for drafted in stream(loaded.model, switch, form.seed, **inputs, **settings, **form.tree_options(loaded)):
            yield Comparison(plain, drafted)
    verdict = judge(loaded, form, inputs["input_ids"], plain.token_ids, drafted.token_ids, switch.pressed)
    yield Comparison(plain, drafted, verdict)
