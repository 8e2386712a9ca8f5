"""The chain on real dialogues: what states made by our own perception, grounding and summaries do for a model."""
