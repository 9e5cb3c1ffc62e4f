"""What the figures depend on."""

import torch
import transformers
from accelerate import PartialState

from hf_ddtree.benchmark.environment import environment
from hf_ddtree.target.timing import cpu_name
from hf_ddtree.testing import tiny_model


def test_environment_names_model_machine_and_versions():
    found = environment(tiny_model("llama", attn_implementation="eager").to(torch.bfloat16), PartialState(cpu=True))
    assert found["dtype"] == "bfloat16" and found["attention"] == "eager"
    assert found["device"] == cpu_name() and found["threads"] == torch.get_num_threads() and found["processes"] == 1
    assert found["torch"] == torch.__version__ and found["transformers"] == transformers.__version__
