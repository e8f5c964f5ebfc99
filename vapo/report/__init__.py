"""Pictures and tables of runs: the curves of one, the comparison of several."""

from vapo.report.comparison import compare
from vapo.report.curves import write_curves

__all__ = ["compare", "write_curves"]
