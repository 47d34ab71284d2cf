"""Door of `python -m benchmarks.quality`."""

from benchmarks.quality.run import main

main()
