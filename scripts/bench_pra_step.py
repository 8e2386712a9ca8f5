#!/usr/bin/env python
"""Time, operations and memory of an alignment step, variant by variant, beside a fine-tuning step on the same x0."""

from remind.alignment.bench import BenchStepConfig, bench_step
from remind.cli import main

if __name__ == "__main__":
    main(BenchStepConfig, bench_step, __doc__)
