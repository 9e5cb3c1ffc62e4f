"""Patches: functions of transformers that obey the keyword `ddtree` while a tree forward runs.

This is the only file that replaces functions of other packages. The keyword travels through `model(...)` down to the
functions in which layers attend or update their states. A patch replaces such a function by a dispatcher for the length
of one forward, so nothing is left behind in transformers. Other threads call the dispatcher without the keyword and get
the original function.
"""

import functools
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any


@dataclass(frozen=True)
class Patch:
    """What to call instead of `namespace[name]` when the keyword `ddtree` is given.

    Args:
        namespace: the variables of a module, or an interface of transformers.
        name: the name of the function in it.
        call: receives the value of the keyword, then the arguments of the function.
    """

    namespace: MutableMapping[str, Any]
    name: str
    call: Callable[..., Any]


@dataclass
class _Replaced:
    original: Callable[..., Any]
    users: int = 0  # tree forwards that are running, in all threads


_lock = Lock()
_replaced: dict[tuple[int, str], _Replaced] = {}


@contextmanager
def patched(patches: list[Patch]) -> Iterator[None]:
    """Apply the patches inside the context."""
    with ExitStack() as stack:
        for patch in patches:
            _apply(patch)
            stack.callback(_remove, patch)
        yield


def _apply(patch: Patch) -> None:
    namespace, name = patch.namespace, patch.name
    with _lock:
        entry = _replaced.setdefault((id(namespace), name), _Replaced(namespace[name]))
        if entry.users == 0:
            namespace[name] = _Dispatcher(entry.original, patch.call)
        entry.users += 1


def _remove(patch: Patch) -> None:
    namespace, name = patch.namespace, patch.name
    with _lock:
        entry = _replaced[id(namespace), name]
        entry.users -= 1
        if entry.users == 0:
            namespace[name] = entry.original
            del _replaced[id(namespace), name]


class _Dispatcher:
    """Calls `replacement` if the keyword `ddtree` is given, and the original function otherwise."""

    def __init__(self, original: Callable[..., Any], replacement: Callable[..., Any]):
        functools.update_wrapper(self, original)
        self.original, self.replacement = original, replacement

    def __call__(self, *args, ddtree=None, **kwargs):
        return self.original(*args, **kwargs) if ddtree is None else self.replacement(ddtree, *args, **kwargs)


def unpatched(function: Any) -> Any:
    """Return the original function if `function` is what a patch put in its place, possibly in another thread.

    Args:
        function: what a namespace of a patch holds.
    """
    return function.original if isinstance(function, _Dispatcher) else function
