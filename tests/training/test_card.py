"""The files beside the weights."""

import json

from hf_ddtree.testing import tiny_model
from hf_ddtree.training.card import write_card, write_log
from hf_ddtree.training.checkpoint import Progress
from hf_ddtree.training.config import TrainConfig

ENTRY = {"step": 40, "seconds": 7, "tokens_per_round": {"chain": 1.5, "16": 2.25}}


def test_write_card_names_target_data_and_figures(tmp_path):
    target = tiny_model("llama")
    target.config.name_or_path = "some/model"
    config = TrainConfig(data=tmp_path / "answers", output=tmp_path / "drafter", seed=3)
    write_card(target, config, Progress({}, log=[{**ENTRY, "step": 20}, ENTRY]))
    card = (config.output / "README.md").read_text(encoding="utf-8")
    assert "license: other" in card and "# DFlash drafter for some/model" in card
    assert 'load_drafter("drafter")' in card and "read from `answers`" in card
    assert "| steps, seconds | 40, 7 |" in card and "| seed | 3 |" in card and "chain: 1.5, 16: 2.25" in card


def test_write_log_holds_settings_and_measurements(tmp_path):
    config = TrainConfig(data=tmp_path / "answers", output=tmp_path)
    write_log(config, Progress({}, log=[ENTRY]))
    log = json.loads((tmp_path / "training_log.json").read_text(encoding="utf-8"))
    assert log["log"] == [ENTRY]
    assert log["config"]["data"] == str(tmp_path / "answers") and log["config"]["layer_ids"] is None
    assert [path.name for path in tmp_path.iterdir()] == ["training_log.json"]
