"""What a question costs at inference, in operations and calls, against the length of the history (Figure 12)."""

from remind.evaluation.cost.config import InferenceCostConfig, TokenSizes
from remind.evaluation.cost.curve import Inference, Way, crossover
from remind.evaluation.cost.flops import Encoder, Shape
from remind.evaluation.cost.run import inference_cost

__all__ = ["Encoder", "Inference", "InferenceCostConfig", "Shape", "TokenSizes", "Way", "crossover", "inference_cost"]
