"""A synthetic dialogue world with known answers: its dialogues, labels, states, and accuracy on its questions."""
