"""Train a DFlash drafter for your own target: `python -m hf_ddtree.training generate|train|evaluate`.

generate   The target answers prompts, and its answers become the training data.
           prompts.py reads or invents the prompts, answers.py generates, data.py holds the files.
train      The drafter learns to predict blocks of these tokens from the target's hidden states. train.py is the loop.
           run.py starts or resumes a run: initial.py makes the drafter, scale.py scales the hidden states,
           optimizers.py and checkpoint.py do what their names say.
           order.py decides which sequences a step sees, and step.py computes the loss of one batch from blocks.py,
           features.py and loss.py. held_out.py keeps the best drafter by acceptance.py, with the card of card.py.
evaluate   The finished drafter drafts for held-out prompts inside `model.generate`: evaluate.py.

config.py holds the options of `generate` and `train`.
"""
