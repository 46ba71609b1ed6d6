"""Thresholds with a promise: valid bounds, the walk over thresholds, certificates."""
