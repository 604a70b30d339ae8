"""Configurations: typed dataclasses, built by Python files and changed by dotted overrides on the
command line.
"""
