#!/usr/bin/env python
"""Score our retrieval on LongMemEval's haystacks by the benchmark's own figures."""

from remind.cli import main
from remind.evaluation.official.retrieval import ScoreRetrievalConfig, score_and_show

if __name__ == "__main__":
    main(ScoreRetrievalConfig, score_and_show, __doc__)
