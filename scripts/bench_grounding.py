#!/usr/bin/env python
"""Cost of grounding one x0 on top of the backbone's forward, part by part."""

from remind.cli import main
from remind.grounding.bench import BenchGroundingConfig, bench_grounding

if __name__ == "__main__":
    main(BenchGroundingConfig, bench_grounding, __doc__)
