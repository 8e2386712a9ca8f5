"""Pre-training of the nano backbone, and its tokenizer, on worlds without the rule."""
