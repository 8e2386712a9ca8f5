"""How well salience finds gold evidence: methods, cross-validation, intervals (`bench_evidence_ratio.py`)."""
