"""People check the drafts: a page or a terminal for each annotator, then agreement and the adjudicated file."""

from remind.refmem.annotation.rows import Row, read_annotations, write_annotations

__all__ = ["Row", "read_annotations", "write_annotations"]
