"""The layer types that a target may have, by their names in `config.layer_types`, and the model types that are refused.

Layers of the masked types are verified under a tree mask (masks.py). A recurrent layer is verified in the same forward
if it has a tree form (gated_delta.py), and path by path otherwise (path_verifier.py).
"""

MASKED_LAYER_TYPES = ("full_attention", "sliding_attention")
HYBRID_LAYER_TYPES = ("hybrid", "hybrid_sliding")  # attention and a recurrent state side by side
# layers whose state is in the cache, and layers without a state
RECURRENT_LAYER_TYPES = ("linear_attention", "conv", *HYBRID_LAYER_TYPES, "mlp", "moe")
# model types without `layer_types` whose only memory is a recurrent state outside of transformers' caches
RECURRENT_MODEL_TYPES = ("rwkv", "xlstm")
# After a cached text, a forward of these over several tokens gives other results than forwards token by token. The
# difference may be so small that only fp32 shows it, or so large that the text changes.
INCONSISTENT_MODEL_TYPES = ("jamba", "nemotron_h", "recurrent_gemma", "zamba2")
