"""Are the marked turns what a model's answer rests on? Removal, sufficiency and ablation against controls.

Text states only: images stand as their captions, as in training and evaluation.
"""

from experiments.faithfulness.config import FaithfulnessConfig

__all__ = ["FaithfulnessConfig"]
