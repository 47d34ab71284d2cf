"""Door of `python -m benchmarks.scan.peers`."""

from benchmarks.scan.peers.run import main

main()
