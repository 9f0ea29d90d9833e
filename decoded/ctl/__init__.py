"""decodectl: one file per verb."""
