"""Configurations: dataclasses, built by Python files and changed by dotted keys on the command
line.
"""
