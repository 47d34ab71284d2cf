"""Door of `python -m benchmarks.quality.models`."""

from benchmarks.quality.models.run import main

main()
