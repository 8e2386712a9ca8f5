"""Build states of real dialogues, align a model with them, and compare what it answers with fine-tuning alone.

Dialogues are divided into folds; every answer is about a dialogue that the model has never seen. Started again, the
same command goes on where it was.
"""

from experiments.chain.config import ChainConfig
from remind.core.cli import main


def run(cfg: ChainConfig) -> None:
    from experiments.chain.run import chain

    chain(cfg)


if __name__ == "__main__":
    main(ChainConfig, run, __doc__)
