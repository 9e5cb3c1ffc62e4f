"""What the page `app.py` shows, without the page: loading, two runs of one request, their verdict, pictures of trees."""

from .models import DRAFTER, PROMPT_LOOKUP, Models
from .request import Request, Sampling
from .session import Comparison, StopSwitch, compare, drafted_rounds
from .tree_svg import tree_svg

__all__ = [
    "DRAFTER",
    "PROMPT_LOOKUP",
    "Comparison",
    "Models",
    "Request",
    "Sampling",
    "StopSwitch",
    "compare",
    "drafted_rounds",
    "tree_svg",
]
