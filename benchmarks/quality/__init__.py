"""How good are the models that Quantsieve finds, and what do they cost to find? Trained models, real data.

`python -m benchmarks.quality` from the repository's root measures and prints the table; README.md says how
to read it.
"""
