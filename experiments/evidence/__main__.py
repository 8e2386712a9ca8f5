"""Evidence ratio: how much gold evidence salience marks within a token budget, cross-validated, against baselines."""

from experiments.evidence.bench import BenchEvidenceConfig, bench_evidence
from remind.core.cli import main

if __name__ == "__main__":
    main(BenchEvidenceConfig, bench_evidence, __doc__)
