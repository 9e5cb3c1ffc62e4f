"""The logic behind the page of `app.py`, without Gradio.

It loads the models, checks what a visitor asks for, runs plain generation and DDTree, compares the two texts and draws
the draft trees.
"""

from .form import Form, Sampling
from .models import DRAFTER, PROMPT_LOOKUP, Loaded, Models
from .rounds import DraftedRound, drafted_rounds
from .run import Run, StopSwitch
from .session import Comparison, compare
from .tree_svg import tree_svg

__all__ = [
    "DRAFTER",
    "PROMPT_LOOKUP",
    "Comparison",
    "DraftedRound",
    "Form",
    "Loaded",
    "Models",
    "Run",
    "Sampling",
    "StopSwitch",
    "compare",
    "drafted_rounds",
    "tree_svg",
]
