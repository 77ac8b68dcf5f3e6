"""Whole logs: written after what programs print, and produced by running them."""
