"""REMIND: reflective memory for vision-language models."""

from remind.dialogue import Corpus, Dialogue, Image, Question, Session, Turn
from remind.kernels import keep_out
from remind.readers import read

keep_out()

__version__ = "0.1.0"
__all__ = ["Corpus", "Dialogue", "Image", "Question", "Session", "Turn", "__version__", "read"]
