"""A thin trainer for VAPO, value-based policy optimisation of reasoning models (arXiv 2504.05118)."""
