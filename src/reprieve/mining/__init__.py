"""Miners that label mismatches, and the label store."""
