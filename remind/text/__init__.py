"""Words, stems and guides: how text is read without a model."""
