"""Operations and LLM calls per question against the length of the history; needs no weights and no GPU."""

from experiments.cost.curve import InferenceCostConfig
from experiments.cost.run import inference_cost
from remind.core.cli import main

if __name__ == "__main__":
    main(InferenceCostConfig, inference_cost, __doc__)
