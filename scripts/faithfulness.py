#!/usr/bin/env python
"""Ask whether the marked turns are what a model's answers rest on: removal, sufficiency, ablation, with controls."""

from remind.cli import main
from remind.evaluation.faithfulness import FaithfulnessConfig, faithfulness_and_show

if __name__ == "__main__":
    main(FaithfulnessConfig, faithfulness_and_show, __doc__)
