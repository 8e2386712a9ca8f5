"""The small dialogues and encoders of tests/perception."""

from tests.perception.conftest import bag, encoder, make_dialogue, park

__all__ = ["bag", "encoder", "make_dialogue", "park"]
