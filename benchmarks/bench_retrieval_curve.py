"""Time, memory, disk and evidence recall of retrieval from histories of up to two million tokens."""

from benchmarks.retrieval_curve.curve import RetrievalCurveConfig, retrieval_curve
from remind.core.cli import main

if __name__ == "__main__":
    main(RetrievalCurveConfig, retrieval_curve, __doc__)
