"""Door of `python -m benchmarks.saturation`."""

from benchmarks.saturation.run import main

main()
