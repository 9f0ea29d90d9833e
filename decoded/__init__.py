"""The decode daemon."""
