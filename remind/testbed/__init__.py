"""A synthetic dialogue world with known answers, and a backbone small enough for any machine."""
