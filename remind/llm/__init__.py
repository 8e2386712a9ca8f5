"""The auxiliary LLM behind one small interface."""

from remind.states.auxiliary import AuxiliaryLLM

__all__ = ["AuxiliaryLLM"]
