"""Time, operations and memory of an alignment step, variant by variant, beside a fine-tuning step on the same x0."""

from benchmarks.pra_step import BenchStepConfig, bench_step
from remind.core.cli import main

if __name__ == "__main__":
    main(BenchStepConfig, bench_step, __doc__)
