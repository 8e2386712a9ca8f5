"""How fast the toolkit is: each module is one benchmark, run as `python -m benchmarks.NAME`."""
