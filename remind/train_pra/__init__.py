"""The commands `train-pra` and `export`: run folders of `PRATrainer`, made from states and read back."""
