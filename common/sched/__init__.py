"""Continuous batching and state bookkeeping. No torch."""
