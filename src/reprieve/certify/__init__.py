"""Proofs that a rule loses little: bounds, certificates, and a monitor."""
