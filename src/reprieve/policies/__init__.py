"""Rules that a server offers, and each request's choice among them."""
