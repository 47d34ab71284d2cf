"""The model as given, as prepared, and as layers."""
