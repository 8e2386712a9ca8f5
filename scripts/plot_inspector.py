#!/usr/bin/env python
"""Photograph a page of the inspector, as the README shows one."""

from remind.cli import main
from remind.inspector.picture import PictureConfig, take_picture

if __name__ == "__main__":
    main(PictureConfig, take_picture, __doc__)
