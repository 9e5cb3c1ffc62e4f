"""The rows of a benchmark: one per prompt, temperature, method and pass, in memory and in a JSONL file."""

import json
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

# The columns are listed in docs/benchmark.md.
Row = dict[str, Any]


def rows_of_pass(rows: list[Row], name: str) -> list[Row]:
    """Return the rows of one pass.

    Args:
        rows: rows of any pass.
        name: "speed" or "timing".
    """
    return [row for row in rows if row["pass"] == name]


def grouped(rows: list[Row]) -> dict[float, dict[str, list[Row]]]:
    """Return the rows by temperature, in rising order, and by method, in order of appearance.

    Args:
        rows: rows of one pass.
    """
    groups: dict[float, dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in sorted(rows, key=lambda row: row["temperature"]):
        groups[row["temperature"]][row["method"]].append(row)
    return groups


class RowFile:
    """A JSONL file that grows with every finished prompt, so that an interrupted run keeps its rows.

    Args:
        path: the file. Missing parent folders are created.
    """

    def __init__(self, path: str):
        self.path = Path(path)

    def clear(self) -> None:
        """Start with an empty file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_bytes(b"")

    def append(self, rows: list[Row]) -> None:
        """Append one line per row, in a single write, so that the lines of several processes do not mix.

        Args:
            rows: the rows of one prompt.
        """
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND)
        try:
            os.write(descriptor, lines.encode())
        finally:
            os.close(descriptor)
