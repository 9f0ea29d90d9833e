"""The prefill daemon."""
