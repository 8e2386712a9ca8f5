"""Building a benchmark of reflective memory from dialogues: clusters, questions, annotation, split, statistics."""
