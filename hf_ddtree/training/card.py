"""The files that describe a trained drafter: its model card and its training log."""

import json
import shlex
import sys
from pathlib import Path

from transformers import PreTrainedModel

from ..files import write_then_rename
from .checkpoint import Progress
from .config import TrainConfig

CARD = """---
license: {license}
library_name: hf_ddtree
tags: [dflash, speculative-decoding]
---

# DFlash drafter for {target}

This drafter drafts for `{target}` in tree speculative decoding:

    import hf_ddtree
    hf_ddtree.enable(model)
    drafter = hf_ddtree.load_drafter("{folder}")
    model.generate(**inputs, assistant_model=drafter, tree_budget=16)

| | |
|---|---|
| target | {target} |
| steps, seconds | {step}, {seconds} |
| seed | {seed} |
| tokens per round on held-out sequences | {figures} |

It was trained on the target's own answers, read from `{data}`:

    {command}

`training_log.json` holds the settings and all measurements. The licence is that of the target's outputs. Check it
before you publish the drafter.
"""


def write_card(target: PreTrainedModel, config: TrainConfig, progress: Progress) -> None:
    """Write README.md beside the weights.

    Args:
        target: gives its name and its licence.
        config: gives the folder, the seed and the name of the data.
        progress: gives the last measurement.
    """
    last = progress.log[-1]
    text = CARD.format(
        license=getattr(target.config, "license", None) or "other",
        target=target.config.name_or_path,
        folder=config.output.name,
        step=last["step"],
        seconds=last["seconds"],
        seed=config.seed,
        figures=", ".join(f"{name}: {value}" for name, value in last["tokens_per_round"].items()),
        data=Path(config.data).name,
        command=shlex.join(["python", "-m", "hf_ddtree.training", *sys.argv[1:]]),
    )
    _write_text(config.output / "README.md", text)


def write_log(config: TrainConfig, progress: Progress) -> None:
    """Write training_log.json beside the weights: the settings and all measurements."""
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(config).items()}
    _write_text(config.output / "training_log.json", json.dumps({"config": settings, "log": progress.log}, indent=1))


def _write_text(path: Path, text: str) -> None:
    write_then_rename(path, lambda unfinished: unfinished.write_text(text, encoding="utf-8"))
