"""Ask whether the marked turns are what a model's answers rest on: removal, sufficiency, ablation, with controls."""

from experiments.faithfulness import FaithfulnessConfig, faithfulness_and_show
from remind.core.cli import main

if __name__ == "__main__":
    main(FaithfulnessConfig, faithfulness_and_show, __doc__)
