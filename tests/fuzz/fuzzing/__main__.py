"""Try hostile inputs on everything that reads files: each must end in one typed line of error, or be read rightly."""

from fuzzing import FuzzConfig, fuzz
from remind.core.cli import main

if __name__ == "__main__":
    main(FuzzConfig, fuzz, __doc__)
