"""What a question costs at inference, in operations and calls, against the length of the history (Figure 12)."""
