"""Probing for notebooks: what fires where, on which texts, and what changes when it is turned up or off."""

from sae.probe.encoded import Encoded, FeatureActivation, top_features
from sae.probe.encoder import Probe
from sae.probe.examples import Example, TopExamples, collect
from sae.probe.query import FeatureMatch, search
from sae.probe.steering import ablate, steer

__all__ = [
    "Encoded",
    "Example",
    "FeatureActivation",
    "FeatureMatch",
    "Probe",
    "TopExamples",
    "ablate",
    "collect",
    "search",
    "steer",
    "top_features",
]
