"""Functions of transformers that obey the keyword `ddtree` while a tree forward runs, and work as ever without it.

The keyword travels through `model(...)` down to the functions in which layers attend or keep their states. These are
replaced by dispatchers for the length of the forward only, so that nothing is left behind in transformers. Other threads,
whose calls lack the keyword, do not notice.
"""

import functools
from collections.abc import Callable, MutableMapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from threading import Lock


@dataclass(frozen=True)
class TreeFunction:
    """What to call in the place of `namespace[name]` when the keyword is given.

    Args:
        namespace: the variables of a module, or an interface of transformers.
        name: of the function.
        call: gets the keyword's value, then the arguments.
    """

    namespace: MutableMapping
    name: str
    call: Callable


@dataclass
class _Replaced:
    original: Callable
    users: int = 0  # tree forwards under way, in all threads


_lock = Lock()
_replaced: dict[tuple[int, str], _Replaced] = {}


@contextmanager
def tree_functions(functions: list[TreeFunction]):
    """Dispatch calls of these functions by the keyword."""
    with ExitStack() as stack:
        for function in functions:
            _enter(function)
            stack.callback(_leave, function)
        yield


def _enter(function: TreeFunction) -> None:
    namespace, name = function.namespace, function.name
    with _lock:
        entry = _replaced.setdefault((id(namespace), name), _Replaced(namespace[name]))
        if entry.users == 0:
            namespace[name] = _dispatcher(entry.original, function.call)
        entry.users += 1


def _leave(function: TreeFunction) -> None:
    namespace, name = function.namespace, function.name
    with _lock:
        entry = _replaced[id(namespace), name]
        entry.users -= 1
        if entry.users == 0:
            namespace[name] = entry.original
            del _replaced[id(namespace), name]


def _dispatcher(original: Callable, tree_function: Callable) -> Callable:
    @functools.wraps(original)
    def call(*args, ddtree=None, **kwargs):
        return original(*args, **kwargs) if ddtree is None else tree_function(ddtree, *args, **kwargs)

    return call
