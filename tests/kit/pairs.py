"""The bundled pair that tests name on command lines: the smaller one."""

from reprieve.bundles import ARITHMETIC

SMALL = ("--target", ARITHMETIC.name)
