"""Small things that several tests share."""

import shutil
import string
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_ddtree.testing import VOCAB_SIZE, ScriptedDrafter

ROOT = Path(__file__).parent.parent


def random_ids(length: int, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> torch.Tensor:
    """`[1, length]` random token ids, special tokens excluded; the global random state is left alone."""
    return torch.randint(4, vocab_size, (1, length), generator=torch.Generator().manual_seed(seed))


def generate(model, input_ids, seed: int = 0, **settings):
    """`model.generate` from a fixed global seed."""
    torch.manual_seed(seed)
    return model.generate(input_ids, **settings)


def scripted(sequence: torch.Tensor, hit_rate: float = 0.9, seed: int = 0, **options) -> ScriptedDrafter:
    """A drafter that knows the output `sequence` `[1, S]`, so that scattered paths of every length are accepted."""
    return ScriptedDrafter(sequence[0].tolist(), hit_rate, seed, **options)


def char_tokenizer() -> PreTrainedTokenizerFast:
    """One character per token for the whole vocabulary of the tiny models; the ids 0 to 3 are special tokens."""
    special = ["<pad>", "<s>", "</s>", "<mask>"]
    characters = list(string.ascii_letters + string.digits + string.punctuation + " ")
    # some more, so that every id of the model has a character
    characters += [chr(0x391 + i) for i in range(VOCAB_SIZE - len(special) - len(characters))]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(special + characters)}, "<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", mask_token="<mask>"
    )


def copy_sources(folder: Path) -> None:
    """Copy into an existing folder what the package is built from: a build leaves its files beside the sources."""
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "hf_ddtree", folder / "hf_ddtree", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "kernels", folder / "kernels")
