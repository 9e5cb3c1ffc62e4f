"""DDTree for Hugging Face transformers: lossless tree speculative decoding inside `model.generate`."""

from .drafters import DFlashConfig, DFlashDraftModel, load_drafter
from .generate import disable, enable
from .output import GenerateDDTreeOutput, Round
from .tree import DraftTree, build_tree

__version__ = "0.1.0"

__all__ = [
    "DFlashConfig",
    "DFlashDraftModel",
    "DraftTree",
    "GenerateDDTreeOutput",
    "Round",
    "build_tree",
    "disable",
    "enable",
    "load_drafter",
]
