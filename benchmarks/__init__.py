"""Measurements behind the numbers in the documentation. Not part of the installed package."""
