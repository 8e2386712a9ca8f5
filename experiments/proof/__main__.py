"""Compare PRA with fine-tuning on the synthetic world: choose settings on dev, run all arms on fresh seeds, report.

Every run is one file under out/runs, and a run that is done is not done again: a killed script goes on where it was.
"""

from experiments.proof.config import ProofConfig
from experiments.proof.prove import prove
from remind.core.cli import main

if __name__ == "__main__":
    main(ProofConfig, prove, __doc__)
