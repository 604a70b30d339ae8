"""Configurations. A configuration is a dataclass that a Python file builds. Dotted keys on the
command line change its values.
"""
