"""What the project proves and reproduces: each package is one experiment, run as `python -m experiments.NAME`."""
