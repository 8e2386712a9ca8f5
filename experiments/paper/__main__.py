"""Tables and figures of the paper: `list` names them, `run ITEM` makes one.

`run ITEM --small true --out DIR` needs nothing but what the checkout ships; in its full form an item needs the inputs
that `list` names. Answers and states are kept in DIR, so that the same command goes on where it was stopped.
"""

from experiments.paper.config import PaperConfig
from experiments.paper.items import paper
from remind.core.cli import main

if __name__ == "__main__":
    main(PaperConfig, paper, __doc__, positional=("action", "item"))
