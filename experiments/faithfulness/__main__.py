"""Ask whether the marked turns are what a model's answers rest on: removal, sufficiency, ablation, with controls."""

from experiments.faithfulness.config import FaithfulnessConfig
from remind.core.cli import main


def run(cfg: FaithfulnessConfig) -> None:
    from experiments.faithfulness.run import faithfulness_and_show

    faithfulness_and_show(cfg)


if __name__ == "__main__":
    main(FaithfulnessConfig, run, __doc__)
