#!/usr/bin/env python
"""Evidence recall of x0: Eq. 1 and the hybrid against BM25 + dense turn retrieval at equal tokens."""

from remind.cli import main
from remind.perception.bench import BenchRetrievalConfig, bench_retrieval

if __name__ == "__main__":
    main(BenchRetrievalConfig, bench_retrieval, __doc__)
