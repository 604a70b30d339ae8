"""Configurations: typed dataclasses, Python files that build them, dotted overrides from the command line."""
