"""The model card of a trained drafter."""

import json
import shlex
import sys
from pathlib import Path

CARD = """---
license: {license}
library_name: hf_ddtree
tags: [dflash, speculative-decoding]
---

# DFlash drafter for {target}

Drafts for `{target}` in tree speculative decoding:

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

Trained on answers of the target itself, read from `{data}`:

    {command}

Log of measurements: `training_log.json`. The licence is that of the target's outputs; check it before publishing.
"""


def write_card(folder: Path, target, config: dict, progress: dict) -> None:
    """Write README.md beside the weights."""
    last = progress["log"][-1]
    text = CARD.format(
        license=getattr(target.config, "license", None) or "other",
        target=target.config.name_or_path,
        folder=folder.name,
        step=last["step"],
        seconds=last["seconds"],
        seed=config["seed"],
        figures=", ".join(f"{name}: {value}" for name, value in last["tokens_per_round"].items()),
        data=Path(config["data"]).name,
        command=shlex.join(["python", "-m", "hf_ddtree.training", *sys.argv[1:]]),
    )
    (folder / "README.md").write_text(text, encoding="utf-8")


def write_log(folder: Path, config: dict, progress: dict) -> None:
    """Write training_log.json: the settings and all measurements."""
    log = {"config": {name: str(v) if isinstance(v, Path) else v for name, v in config.items()}, "log": progress["log"]}
    (folder / "training_log.json").write_text(json.dumps(log, indent=1), encoding="utf-8")
