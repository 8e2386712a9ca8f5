"""Probing for notebooks: what fires where, on which texts, and what changes when it is turned up or off."""

from sae.probe.encoder import Encoded, FeatureActivation, Probe, top_features
from sae.probe.examples import Example, FeatureMatch, TopExamples, collect, search
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
