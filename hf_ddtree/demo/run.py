"""One generation in a thread, which the page watches while it runs and can stop."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from queue import Queue
from typing import Any

import torch
from transformers import PreTrainedModel, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from .rounds import DraftedRound, drafted_rounds

REFRESH_SECONDS = 0.15  # drawing the page more often would take time from the generation


@dataclass
class StopSwitch:
    """A switch that ends the generation that watches it, after its current token."""

    pressed: bool = False


class StopCriterion(StoppingCriteria):
    """Stop every row once the switch is pressed."""

    def __init__(self, switch: StopSwitch) -> None:
        self.switch = switch

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Return `[B]` booleans: whether each row stops."""
        return torch.full((input_ids.shape[0],), self.switch.pressed, dtype=torch.bool, device=input_ids.device)


@dataclass(frozen=True)
class Run:
    """A generation that is running or finished.

    Args:
        token_ids: the new tokens so far.
        seconds: time from the call to the latest token.
        first_token_seconds: time from the call to the first token, or None before it.
        finished: whether the generation has ended.
        rounds: the rounds of a finished run with DDTree, otherwise None.
    """

    token_ids: list[int] = field(default_factory=list)
    seconds: float = 0.0
    first_token_seconds: float | None = None
    finished: bool = False
    rounds: list[DraftedRound] | None = None

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second, with the prefill included in the time."""
        return len(self.token_ids) / self.seconds if self.seconds else 0.0


class _Watcher(BaseStreamer):
    """Put each group of new tokens and its time into a queue."""

    def __init__(self, queue: Queue) -> None:
        self.queue, self.prompt_seen = queue, False

    def put(self, value: torch.Tensor) -> None:
        if self.prompt_seen:
            self.queue.put((value.flatten().tolist(), time.perf_counter()))
        self.prompt_seen = True

    def end(self) -> None:
        """Do nothing: the thread itself reports its end, which works after an exception too."""


def stream(model: PreTrainedModel, switch: StopSwitch, seed: int, **settings: Any) -> Iterator[Run]:
    """Call `model.generate` in a thread and yield the run several times per second, last with its rounds.

    Closing the iterator presses the switch, which stops the generation.

    Args:
        model: the target, enabled if the settings ask for a tree.
        switch: stops the generation.
        seed: the global random seed from which the generation starts.
        settings: the arguments of `generate`, with `input_ids` `[1, S]`.

    Raises:
        Exception: every exception that `generate` raises.
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


def _generate(model: PreTrainedModel, seed: int, arguments: dict[str, Any]) -> object:
    torch.manual_seed(seed)
    return model.generate(**arguments)
