"""Retrieval from histories of up to millions of tokens: how they are made, and what an index of them costs."""
