"""What signed and unsigned 8-bit weights give on a processor without VNNI, emulated by qemu where this one has it.

`python -m benchmarks.saturation` from the repository's root writes the demo model as full int8 with both weight types,
runs the files here and under `qemu-x86_64 -cpu Haswell`, and prints the probe and measured over simulated MSE.
"""
