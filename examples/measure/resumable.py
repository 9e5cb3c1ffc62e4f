"""Results of a long measurement, kept line by line, so that a run can be stopped and continued."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Results:
    """A mapping from keys to JSON values that is appended to a file as it grows.

    Args:
        path: a JSONL file. The results of an earlier run in it are used again. None keeps all results in memory.
    """

    def __init__(self, path: str | None):
        self.path = None if path is None else Path(path)
        self.values: dict[tuple, Any] = {}
        if self.path is not None and self.path.exists():
            for line in self.path.read_text(encoding="utf-8").splitlines():
                entry = json.loads(line)
                self.values[tuple(entry["key"])] = entry["value"]

    def get(self, key: tuple, compute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return the value of a key, and compute it first if it is missing.

        Args:
            key: strings, numbers and None.
            compute: returns the value, as `compute(*args, **kwargs)`.
            args: its arguments.
            kwargs: its keyword arguments.
        """
        if key not in self.values:
            self.values[key] = value = compute(*args, **kwargs)
            if self.path is not None:
                with self.path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"key": key, "value": value}) + "\n")
        return self.values[key]
