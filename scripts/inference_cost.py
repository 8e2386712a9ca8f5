#!/usr/bin/env python
"""Operations and LLM calls per question against the length of the history; needs no weights and no GPU."""

from remind.cli import main
from remind.evaluation.cost import InferenceCostConfig, inference_cost

if __name__ == "__main__":
    main(InferenceCostConfig, inference_cost, __doc__)
