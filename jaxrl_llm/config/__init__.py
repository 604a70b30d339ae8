"""Configurations: dataclasses, built by Python files, changed by dotted command-line overrides."""
