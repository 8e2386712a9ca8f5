"""The file formats and figures of LongMemEval and LoCoMo, as their own scorers have them."""
