#!/usr/bin/env python
"""Evidence ratio: how much gold evidence salience marks within a token budget, cross-validated, against baselines."""

from remind.cli import main
from remind.grounding.evidence.bench import BenchEvidenceConfig, bench_evidence

if __name__ == "__main__":
    main(BenchEvidenceConfig, bench_evidence, __doc__)
