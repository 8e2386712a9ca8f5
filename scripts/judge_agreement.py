#!/usr/bin/env python
"""Compare a judge's verdicts with labels in a file, by dimension."""

from remind.cli import main
from remind.evaluation.agreement import AgreementConfig, agreement_and_show

if __name__ == "__main__":
    main(AgreementConfig, agreement_and_show, __doc__)
