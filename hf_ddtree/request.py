"""The user's options (`TreeConfig`), and the resolved settings of one call of `generate` (`Request`)."""

from dataclasses import dataclass

from transformers import GenerationConfig, LogitsProcessorList

from .sampling.policies import Policy

TREE_OPTIONS = ("tree_budget", "tree_sampling", "tree_attention", "tree_trace", "tree_timing")
# A forward over this many tokens costs as much as a long prompt in every round, so a larger number is a mistake.
MAX_TREE_BUDGET = 16_384
DEFAULT_LOOKUP_DEPTH = 10  # of a prompt look-up tree, if `prompt_lookup_num_tokens` is not given
# A longer common suffix says nothing more about the next token, and repetitive text would make the search long.
DEFAULT_LOOKUP_MATCH = 16


@dataclass(frozen=True)
class TreeConfig:
    """The tree options of `generate`. `generate` checks their values when it is called.

    Args:
        tree_budget: the number of drafted nodes per round, root excluded, from 1 to 16,384. Usual values are 8 to 1024.
            "auto" selects in every round the nodes that are worth their time on this machine, which may be none.
        tree_sampling: which children the nodes get under `do_sample=True`. The output has the target's distribution
            with each policy; they differ in how many drafted tokens are accepted. Prompt look-up never draws children,
            and a drafter of your own makes this choice itself.
            - "target": the most probable children. The target's own draw is kept if it is among them. The same seed
              gives the same text as plain sampling.
            - "hybrid": the most probable children, and one child drawn from the drafter's distribution outside them.
            - "swor": children drawn without replacement.
            - "spectr": children drawn independently.
        tree_attention: which attention verifies the tree.
            - "triton": the Triton kernel, which needs no mask.
            - "sdpa": PyTorch's attention under a mask, or transformers' eager attention where a model needs it.
            - "auto": "triton" on a GPU if Triton is installed and the kernel fits the model, otherwise "sdpa".
        tree_trace: keep each round's tree and path in the output's `rounds`.
        tree_timing: keep each round's seconds per stage. This waits for the device between stages and costs speed.

    Example:
        >>> import dataclasses
        >>> options = hf_ddtree.TreeConfig(tree_budget=64, tree_sampling="swor")
        >>> output = model.generate(**inputs, assistant_model=drafter, **dataclasses.asdict(options))
    """

    tree_budget: int | str
    tree_sampling: str = "hybrid"
    tree_attention: str = "auto"
    tree_trace: bool = False
    tree_timing: bool = False


@dataclass(frozen=True)
class Request:
    """The resolved settings of one call of `generate`. The decoding loop reads these instead of transformers' settings.

    Args:
        tree_budget: drafted nodes per round, or "auto".
        tree_attention: the attention the user asked for: "auto", "sdpa" or "triton".
        trace: keep each round's tree and path.
        timing: keep each round's seconds per stage.
        policy: which children a node may get. Greedy decoding draws none.
        do_sample: sample, instead of taking the most probable token.
        temperature: the sampling temperature, 0 for greedy decoding.
        warpers: temperature, top-k, top-p and min-p, to be applied to draft logits. Empty for greedy decoding.
        max_length: the maximum length of the finished sequence in tokens, prompt and padding included.
        lookup_depth: the depth of a prompt look-up tree.
        lookup_match: the longest suffix that prompt look-up compares, in tokens.
        return_dict: return a `GenerateDDTreeOutput` instead of the sequence alone.
        keep_scores: return the processed logits of each emitted token.
        keep_logits: return the raw logits of each emitted token.
        keep_hidden_states: return the hidden states that chose each emitted token.
        generation_config: the settings of the call. Only transformers' own prefill reads them.
    """

    tree_budget: int | str
    tree_attention: str
    trace: bool
    timing: bool
    policy: Policy
    do_sample: bool
    temperature: float
    warpers: LogitsProcessorList
    max_length: int
    lookup_depth: int
    lookup_match: int
    return_dict: bool
    keep_scores: bool
    keep_logits: bool
    keep_hidden_states: bool
    generation_config: GenerationConfig
