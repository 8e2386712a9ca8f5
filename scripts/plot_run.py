#!/usr/bin/env python
"""Draw what training runs went through: loss shares and divergences (Figure 14), cross-entropies, accuracy."""

from remind.core.cli import main
from remind.viewing.plots.trajectory import PlotRunConfig, plot_run

if __name__ == "__main__":
    main(PlotRunConfig, plot_run, __doc__)
