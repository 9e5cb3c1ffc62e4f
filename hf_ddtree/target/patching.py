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
            namespace[name] = _dispatcher(entry.original, patch.call)
        entry.users += 1


def _remove(patch: Patch) -> None:
    namespace, name = patch.namespace, patch.name
    with _lock:
        entry = _replaced[id(namespace), name]
        entry.users -= 1
        if entry.users == 0:
            namespace[name] = entry.original
            del _replaced[id(namespace), name]


def _dispatcher(original: Callable[..., Any], replacement: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args, ddtree=None, **kwargs):
        return original(*args, **kwargs) if ddtree is None else replacement(ddtree, *args, **kwargs)

    return call
