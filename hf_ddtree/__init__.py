"""DDTree for Hugging Face transformers: lossless tree speculative decoding inside `model.generate`."""

from .build import build_tree
from .drafters.base import Drafter
from .drafters.dflash_model import DFlashConfig, DFlashDraftModel
from .drafters.load import load_drafter
from .embedded import load_embedded
from .enable import disable, enable
from .output import GenerateDDTreeOutput, Round
from .request import TreeConfig
from .sampling.policies import POLICIES
from .sampling.randomness import Randomness
from .tree import DraftTree

__version__ = "0.1.0"

__all__ = [
    "POLICIES",
    "DFlashConfig",
    "DFlashDraftModel",
    "DraftTree",
    "Drafter",
    "GenerateDDTreeOutput",
    "Randomness",
    "Round",
    "TreeConfig",
    "build_tree",
    "disable",
    "enable",
    "load_drafter",
    "load_embedded",
]
