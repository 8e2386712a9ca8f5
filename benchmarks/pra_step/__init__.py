"""What a step of alignment costs beside a step of plain fine-tuning on the same x0."""

from benchmarks.pra_step.run import BenchStepConfig, bench_step

__all__ = ["BenchStepConfig", "bench_step"]
