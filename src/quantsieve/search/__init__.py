"""From prices to plans."""
