"""Training recipes that turn labels into heads, and the training loop."""
