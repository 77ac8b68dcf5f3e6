"""Logs written after what programs print, by what they are about."""
