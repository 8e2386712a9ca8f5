"""Evidence recall of memory systems. `reranker`: RMM's reranker, which learns from citations."""

from experiments.memory.config import MemoryExperimentConfig
from remind.core.cli import main


def run(cfg: MemoryExperimentConfig) -> None:
    from experiments.memory.reranker import reranker_and_show

    reranker_and_show(cfg)


if __name__ == "__main__":
    main(MemoryExperimentConfig, run, __doc__, positional=("item",))
