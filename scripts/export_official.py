#!/usr/bin/env python
"""Write the answers of a run as a results file of LongMemEval or LoCoMo."""

from remind.cli import main
from remind.evaluation.official.export import ExportOfficialConfig, export_and_show

if __name__ == "__main__":
    main(ExportOfficialConfig, export_and_show, __doc__)
