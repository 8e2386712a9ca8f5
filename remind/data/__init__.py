"""Dialogues and questions, the files they are read from, and how questions are split."""
