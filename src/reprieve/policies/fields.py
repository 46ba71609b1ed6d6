"""Request fields that choose a rule."""

THRESHOLD, SWITCH, LEVEL = "reprieve_threshold", "reprieve_rule", "reprieve_leniency"
REQUIRE = "reprieve_require"  # selects nothing: the request is refused if it would get a weaker guarantee
PREFIX = "reprieve_"
CHOICES = (THRESHOLD, SWITCH, LEVEL)
FIELDS = (*CHOICES, REQUIRE)
