"""Tables and figures of the paper: `list` names them with their state, `run ITEM` makes one.

`run ITEM --small --out DIR` needs nothing but what the package ships; without `--small` an item needs the inputs that
`list` names. Answers and states are kept in DIR, so that the same command goes on where it was stopped.
"""

import sys

from experiments.paper.config import PaperConfig
from experiments.paper.items import paper
from remind.core.cli import main


def with_flag(words: list[str]) -> list[str]:
    """`--small` on its own means true."""
    following = [*words[1:], ""]
    bare = [word == "--small" and after not in ("true", "false") for word, after in zip(words, following, strict=False)]
    return ["--small=true" if alone else word for word, alone in zip(words, bare, strict=True)]


if __name__ == "__main__":
    main(PaperConfig, paper, __doc__, with_flag(sys.argv[1:]), positional=("action", "item"))
