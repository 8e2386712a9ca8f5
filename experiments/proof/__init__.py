"""The proof on the synthetic world: many small training runs by arm, condition and seed, and what they come to."""
