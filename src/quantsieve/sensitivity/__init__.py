"""What the rounding of each place does to the output."""
