"""What memory systems find of the gold evidence, part by part."""
