"""The auxiliary LLM behind one small interface."""

from remind.llm.base import AuxiliaryLLM

__all__ = ["AuxiliaryLLM"]
