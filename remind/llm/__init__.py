"""The auxiliary LLM behind one small interface."""
