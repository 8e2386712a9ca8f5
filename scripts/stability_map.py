#!/usr/bin/env python
"""Map where PRA holds and where it collapses: learning rate, temperature, teacher, hard levels and target gradient.

Every run is one file under out/runs, and a run that is done is not done again: a killed script goes on where it was.
"""

from remind.cli import main
from remind.testbed.stability import StabilityConfig, stability

if __name__ == "__main__":
    main(StabilityConfig, stability, __doc__)
