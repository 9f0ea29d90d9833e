"""Pure decisions: frozen facts and now in, a decision out."""
