"""The settings."""

import pytest

from hf_ddtree.training.config import TrainConfig


def test_train_config_refuses_a_block_without_a_token_to_predict(tmp_path):
    with pytest.raises(ValueError, match=r"--block-size 1 .*at least 2"):
        TrainConfig(data=tmp_path, output=tmp_path, block_size=1)
