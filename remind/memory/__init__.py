"""Memory systems: what a system keeps of a dialogue, finds for a question, and what that costs."""
