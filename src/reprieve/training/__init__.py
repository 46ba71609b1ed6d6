"""Recipes that turn labels into heads, and the one training loop."""
