"""What does a scan of every layer cost beside plain loops and beside the tools that users have?

`python -m benchmarks.scan.peers` from the repository's root measures and prints the table; ../README.md says how to
read it. Each row is a runner in a process, and peers have an environment of their own, made for the run.
"""
