"""Configurations are dataclasses: a Python file builds one, and dotted keys on the command line
change its values.
"""
