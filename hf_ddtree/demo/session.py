"""Running one request twice, plainly and then with a tree, while a page watches."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from queue import Queue

import torch
from transformers import PreTrainedModel, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from ..tree import DraftTree
from .models import Loaded
from .request import Request
from .verdict import Verdict, judge

REFRESH_SECONDS = 0.15  # drawing more often would take time from the generation


@dataclass
class StopSwitch:
    """Ends the generation that watches it, after its current token."""

    pressed: bool = False


class StopCriterion(StoppingCriteria):
    """True once the switch is pressed."""

    def __init__(self, switch: StopSwitch):
        self.switch = switch

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((input_ids.shape[0],), self.switch.pressed, device=input_ids.device)


@dataclass(frozen=True)
class DraftedRound:
    """One round as it is drawn: its tree, the accepted nodes from the root down, and the token that left the tree."""

    tree: DraftTree
    path: list[int]
    bonus: int | None


@dataclass
class Run:
    """A generation, under way or finished.

    Args:
        token_ids: the new tokens so far.
        seconds: from the call until the latest token.
        first_token_seconds: from the call until the first token.
        finished: it has ended.
        rounds: after the end of a run with a tree, its rounds.
    """

    token_ids: list[int] = field(default_factory=list)
    seconds: float = 0.0
    first_token_seconds: float | None = None
    finished: bool = False
    rounds: list[DraftedRound] | None = None

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second, prefill included."""
        return len(self.token_ids) / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Comparison:
    """Both runs so far, and after their end the verdict."""

    plain: Run
    drafted: Run | None = None
    verdict: Verdict | None = None


def compare(loaded: Loaded, request: Request, switch: StopSwitch) -> Iterator[Comparison]:
    """Run the request plainly, then with a tree; yields what there is to see a few times per second.

    One run after the other, so that neither takes the other's cores. A pressed switch ends the comparison.
    """
    inputs, settings = request.inputs(loaded), request.settings()
    seed = request.sampling.seed if request.sampling else 0
    plain = Run()
    for plain in stream(loaded.model, switch, seed, **inputs, **settings):
        yield Comparison(plain)
    drafted = Run()
    if not switch.pressed:
        for drafted in stream(loaded.model, switch, seed, **inputs, **settings, **request.tree_options(loaded)):
            yield Comparison(plain, drafted)
    verdict = judge(loaded, request, inputs["input_ids"], plain.token_ids, drafted.token_ids, switch.pressed)
    yield Comparison(plain, drafted, verdict)


class _Watcher(BaseStreamer):
    """Puts each new token and its time into a queue."""

    def __init__(self, queue: Queue):
        self.queue, self.prompt_seen = queue, False

    def put(self, value):
        if self.prompt_seen:
            self.queue.put((value.flatten().tolist(), time.perf_counter()))
        self.prompt_seen = True

    def end(self):
        pass  # the thread says so itself, also where it fails


def stream(model: PreTrainedModel, switch: StopSwitch, seed: int, **settings) -> Iterator[Run]:
    """Call `model.generate` in a thread and yield the run as it grows, at the end with its rounds.

    Where the consumer goes away, the generation is stopped.

    Raises:
        Exception: whatever `generate` raised.
    """
    queue: Queue = Queue()
    start = shown = time.perf_counter()
    arguments = {**settings, "streamer": _Watcher(queue), "stopping_criteria": [StopCriterion(switch)]}
    run = Run()
    with ThreadPoolExecutor(max_workers=1) as thread:
        generation = thread.submit(_generate, model, seed, arguments)
        generation.add_done_callback(lambda done: queue.put(None))
        try:
            for tokens, now in iter(queue.get, None):
                first = run.first_token_seconds or now - start
                run = replace(run, token_ids=run.token_ids + tokens, seconds=now - start, first_token_seconds=first)
                if now - shown > REFRESH_SECONDS:
                    shown = now
                    yield run
        finally:
            switch.pressed = switch.pressed or not generation.done()
    rounds = drafted_rounds(generation.result(), settings["input_ids"].shape[1])
    yield replace(run, finished=True, rounds=rounds)


def _generate(model: PreTrainedModel, seed: int, arguments: dict):
    torch.manual_seed(seed)
    return model.generate(**arguments)


def drafted_rounds(output, prompt_length: int) -> list[DraftedRound] | None:
    """The rounds of an output made with `tree_trace=True`, or None for a plain one."""
    rounds = getattr(output, "rounds", None)
    if rounds is None:
        return None
    sequence, root = output.sequences[0].tolist(), prompt_length
    drafted = []
    for entry in rounds:
        root += len(entry.path)  # where this round's bonus token is, which is the next root
        bonus = sequence[root] if root < len(sequence) else None
        drafted.append(DraftedRound(entry.tree, entry.path, bonus))
    return drafted
