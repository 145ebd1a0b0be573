"""The attacks of fuzz.py, one module for each topic."""
