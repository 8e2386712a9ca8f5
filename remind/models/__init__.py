"""Backbones, their chat format and images, the sentence encoder, and generation."""
