"""Backbones, their chat format and images, the sentence encoder, and generation."""

#: Names of models that come with a package, in place of a folder or hub id.
BUILT_IN = ("minilm", "nano", "nano-untrained", "smollm2")
