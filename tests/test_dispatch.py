"""How functions of transformers are made to obey the keyword `ddtree`, and that nothing stays behind."""

import sys
import threading

import pytest
import torch

import hf_ddtree
from hf_ddtree.attention import attention_functions
from hf_ddtree.dispatch import TreeFunction, tree_functions
from hf_ddtree.gated_delta import gated_delta_functions
from hf_ddtree.testing import GATED_DELTA_FAMILIES, VOCAB_SIZE, tiny_model


def plain(x, factor=2):
    return factor * x


def of_trees(tree, x, factor=2):
    return f"{tree} {x} {factor}"


@pytest.fixture
def namespace():
    return {"function": plain}


def test_the_keyword_decides(namespace):
    with tree_functions([TreeFunction(namespace, "function", of_trees)]):
        assert namespace["function"](3) == 6
        assert namespace["function"](3, factor=5) == 15
        assert namespace["function"](3, factor=5, ddtree="tree") == "tree 3 5"
    assert namespace == {"function": plain}


def test_the_original_is_back_after_an_error(namespace):
    with pytest.raises(ZeroDivisionError), tree_functions([TreeFunction(namespace, "function", of_trees)]):
        raise ZeroDivisionError
    assert namespace == {"function": plain}


def test_forwards_of_several_threads_share_the_dispatchers(namespace):
    functions, inside, leave = [TreeFunction(namespace, "function", of_trees)], threading.Event(), threading.Event()

    def other():
        with tree_functions(functions):
            inside.set()
            leave.wait()

    thread = threading.Thread(target=other)
    thread.start()
    inside.wait()
    with tree_functions(functions):
        dispatcher = namespace["function"]
    assert namespace["function"] is dispatcher, "the other thread still needs it"
    leave.set()
    thread.join()
    assert namespace == {"function": plain}


@pytest.mark.parametrize("family", ["llama", "gemma2", *GATED_DELTA_FAMILIES])
def test_generating_leaves_no_trace_in_transformers(family):
    model = hf_ddtree.enable(tiny_model(family))
    functions = attention_functions(model, use_kernel=True) + gated_delta_functions(model)
    assert functions

    def current():
        return [function.namespace[function.name] for function in functions]

    before = current()
    files = {name: dict(vars(module)) for name, module in sys.modules.items() if name.startswith("transformers.models.")}
    prompt = torch.randint(4, VOCAB_SIZE, (1, 8), generator=torch.Generator().manual_seed(0))
    model.generate(prompt, max_new_tokens=6, tree_budget=4)
    assert current() == before
    assert all(dict(vars(sys.modules[name])) == names for name, names in files.items())
    with tree_functions(functions):
        assert current() != before
