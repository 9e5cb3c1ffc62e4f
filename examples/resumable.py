"""Results of a long measurement, kept line by line, so that it can be stopped and go on later."""

import json
from pathlib import Path


class Results:
    """A mapping from keys (lists of strings and numbers) to JSON values, appended to a file as it grows.

    Args:
        path: a JSONL file; what it holds from an earlier run counts. None keeps everything in memory.
    """

    def __init__(self, path: str | None):
        self.path = None if path is None else Path(path)
        self.values = {}
        if self.path is not None and self.path.exists():
            for line in self.path.read_text(encoding="utf-8").splitlines():
                entry = json.loads(line)
                self.values[tuple(entry["key"])] = entry["value"]

    def get(self, key: tuple, measure, *args, **kwargs):
        """The value of `key`: `measure(*args, **kwargs)`, called now if it is not there yet."""
        if key not in self.values:
            self.values[key] = value = measure(*args, **kwargs)
            if self.path is not None:
                with self.path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"key": key, "value": value}) + "\n")
        return self.values[key]
