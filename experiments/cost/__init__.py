"""What a question costs at inference, in operations and calls, against the length of the history (Figure 12)."""

from experiments.cost.curve import Inference, InferenceCostConfig, TokenSizes, Way, crossover
from experiments.cost.flops import Encoder, Shape
from experiments.cost.run import inference_cost

__all__ = ["Encoder", "Inference", "InferenceCostConfig", "Shape", "TokenSizes", "Way", "crossover", "inference_cost"]
