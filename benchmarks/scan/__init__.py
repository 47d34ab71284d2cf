"""What does an exact scan of every noise source cost, in passes of the float model, and what would plain loops cost?

`python -m benchmarks.scan` from the repository's root measures and prints the table; README.md says how to read it.
"""
