"""Training logs: source, unwrap, scan, story, and the facts that come of them."""
