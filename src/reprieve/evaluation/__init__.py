"""Measuring arms side by side: runner, results, figure."""
