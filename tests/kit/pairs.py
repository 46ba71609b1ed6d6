"""The pair that most tests name: small, trained, with every kind of head."""

from reprieve.bundles import BUNDLES

ARITHMETIC = BUNDLES["reprieve/arithmetic-pair"]  # tests/fixtures/arithmetic; tests/conftest.py names the folder
SMALL = ("--target", ARITHMETIC.name)
