"""From labels to artefacts: one file per recipe."""
