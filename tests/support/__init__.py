"""Helpers that tests import as ``support``."""
