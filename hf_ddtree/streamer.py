"""Holding the prompt back from a streamer until the request has passed every check."""

from typing import Any

from transformers.generation.streamers import BaseStreamer


class HeldStreamer(BaseStreamer):
    """Passes everything on to a streamer, but holds the prompt back until it is released, or until the first token.

    `generate` hands the prompt to the streamer before it calls the decoding loop, where a request may still be refused.
    The streamer would then hold a text that has begun. No error ends the streamer, as in plain `generate`, because its
    end means that the text is complete.

    Args:
        streamer: the user's streamer.
    """

    def __init__(self, streamer: BaseStreamer):
        self.streamer = streamer
        self.held: list[Any] = []
        self.released = False

    def release(self) -> BaseStreamer:
        """Hand over the prompt, and return the user's streamer."""
        for value in self.held:
            self.streamer.put(value)
        self.held, self.released = [], True
        return self.streamer

    def put(self, value):
        """Hold the first value back, and pass on all others.

        Args:
            value: token ids.
        """
        if self.held or self.released:
            self.release().put(value)
        else:
            self.held.append(value)

    def end(self):
        """Pass on the end of the text."""
        self.release().end()
