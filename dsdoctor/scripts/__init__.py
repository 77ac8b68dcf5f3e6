"""What a training script says by its text alone; it is parsed and never run."""
