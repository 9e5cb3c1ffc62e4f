"""Train a DFlash drafter for one's own target: `python -m hf_ddtree.training generate|train|evaluate`.

generate  the target answers prompts; its own tokens are the training data (data.py, prompts.py, generate.py)
train     a drafter learns to predict blocks of these tokens from the target's hidden states (blocks.py, loss.py,
          checkpoint.py, acceptance.py, train.py)
evaluate  tokens per round of the finished drafter on held-out prompts, through `model.generate` (evaluate.py)
"""
