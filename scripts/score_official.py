#!/usr/bin/env python
"""Score a results file of LongMemEval or LoCoMo again and write it back."""

from remind.cli import main
from remind.evaluation.official.score import ScoreOfficialConfig, score_and_show

if __name__ == "__main__":
    main(ScoreOfficialConfig, score_and_show, __doc__)
