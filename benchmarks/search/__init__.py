"""How long does the search take for models far larger than the zoo's? Random problems, no model is run."""
