#!/usr/bin/env python
"""Time, memory, disk and evidence recall of retrieval from histories of up to two million tokens."""

from remind.cli import main
from remind.perception.scale.curve import RetrievalCurveConfig, retrieval_curve

if __name__ == "__main__":
    main(RetrievalCurveConfig, retrieval_curve, __doc__)
