"""What runs inside of a sandbox. Standard library only, and nothing else of this package: a bare Python imports it."""
