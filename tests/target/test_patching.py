"""Functions of transformers obey the keyword `ddtree` inside a patch, and nothing stays behind."""

import sys
import threading

import pytest
from helpers import random_ids

import hf_ddtree
from hf_ddtree.target.gated_delta import gated_delta_patches
from hf_ddtree.target.kernel_attention import KernelForward
from hf_ddtree.target.patching import Patch, patched, unpatched
from hf_ddtree.testing import GATED_DELTA_FAMILIES, tiny_model


def plain(x, factor=2):
    return factor * x


def of_trees(tree, x, factor=2):
    return f"{tree} {x} {factor}"


@pytest.fixture
def namespace():
    return {"function": plain}


def test_patched_function_obeys_the_keyword(namespace):
    with patched([Patch(namespace, "function", of_trees)]):
        assert namespace["function"](3) == 6
        assert namespace["function"](3, factor=5) == 15
        assert namespace["function"](3, factor=5, ddtree="tree") == "tree 3 5"
    assert namespace == {"function": plain}


def test_unpatched_is_the_original_function(namespace):
    assert unpatched(plain) is plain and unpatched(None) is None
    with patched([Patch(namespace, "function", of_trees)]):
        assert unpatched(namespace["function"]) is plain


def test_patched_restores_the_original_after_an_error(namespace):
    with pytest.raises(ZeroDivisionError), patched([Patch(namespace, "function", of_trees)]):
        raise ZeroDivisionError
    assert namespace == {"function": plain}


def test_patched_shares_the_dispatchers_between_threads(namespace):
    patches, inside, leave = [Patch(namespace, "function", of_trees)], threading.Event(), threading.Event()

    def other():
        with patched(patches):
            inside.set()
            leave.wait()

    thread = threading.Thread(target=other, daemon=True)  # so that a failure does not hang
    thread.start()
    inside.wait()
    with patched(patches):
        dispatcher = namespace["function"]
    assert namespace["function"] is dispatcher, "the other thread still needs it"
    leave.set()
    thread.join()
    assert namespace == {"function": plain}


@pytest.mark.parametrize("family", ["llama", "gemma2", *GATED_DELTA_FAMILIES])
def test_patched_leaves_no_trace_in_transformers(family):
    model = hf_ddtree.enable(tiny_model(family))
    patches = KernelForward.patches(model) + gated_delta_patches(model)
    assert patches

    def current():
        return [patch.namespace[patch.name] for patch in patches]

    before = current()
    modules = {name: module for name, module in sys.modules.items() if name.startswith("transformers.models.")}
    files = {name: dict(vars(module)) for name, module in modules.items()}
    model.generate(random_ids(8), max_new_tokens=6, tree_budget=4)
    assert current() == before
    assert all(dict(vars(sys.modules[name])) == names for name, names in files.items())
    with patched(patches):
        assert current() != before


def test_patched_replaces_a_function_by_name_with_one_that_keeps_its_name(namespace):
    namespace["other"] = plain
    with patched([Patch(namespace, "function", of_trees)]):
        assert namespace["function"] is not plain and namespace["function"].__name__ == "plain"
        assert namespace["other"] is plain


def test_patched_restores_what_it_replaced_if_a_later_patch_fails(namespace):
    patches = [Patch(namespace, name, of_trees) for name in ("function", "absent")]
    with pytest.raises(KeyError), patched(patches):
        pytest.fail("a patch of a function that does not exist must fail")
    assert namespace == {"function": plain}
