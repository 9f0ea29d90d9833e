"""prefillctl: one file per verb."""
