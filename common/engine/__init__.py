"""torch and transformers: loading, state, attention, running, sampling. No network."""
