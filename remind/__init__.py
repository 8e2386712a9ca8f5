"""REMIND: reflective memory for vision-language models."""

from remind.data.dialogue import Corpus, Dialogue, Image, Question, Session, Turn
from remind.data.readers import read
from remind.models.kernels import keep_out

keep_out()

__version__ = "0.1.0"
__all__ = ["Corpus", "Dialogue", "Image", "Question", "Session", "Turn", "__version__", "read"]
