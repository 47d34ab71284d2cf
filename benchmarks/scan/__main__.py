"""Door of `python -m benchmarks.scan`."""

from benchmarks.scan.run import main

main()
