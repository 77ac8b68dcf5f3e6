"""The detector inside other trainers: one module each, which imports its framework only when it is imported itself."""
