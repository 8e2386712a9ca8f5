"""Are the marked turns what a model's answer rests on? Removal, sufficiency and ablation against controls.

Text states only: images stand as their captions, as in training and evaluation.
"""

from experiments.faithfulness.ablation import ablated_logprob, guidance_features
from experiments.faithfulness.attribution import attention_to_turns, gradient_times_input
from experiments.faithfulness.config import FaithfulnessConfig
from experiments.faithfulness.edits import evidence_turns, fill, marked_turns, only_turns, without_turns
from experiments.faithfulness.logprob import answer_logprob, answer_logprobs, answer_tokens, target_ids
from experiments.faithfulness.places import Prompt, prompt_of
from experiments.faithfulness.run import faithfulness, faithfulness_and_show

__all__ = [
    "FaithfulnessConfig",
    "Prompt",
    "ablated_logprob",
    "answer_logprob",
    "answer_logprobs",
    "answer_tokens",
    "attention_to_turns",
    "evidence_turns",
    "faithfulness",
    "faithfulness_and_show",
    "fill",
    "gradient_times_input",
    "guidance_features",
    "marked_turns",
    "only_turns",
    "prompt_of",
    "target_ids",
    "without_turns",
]
