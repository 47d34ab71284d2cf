"""The run folder and the line that fills it."""
