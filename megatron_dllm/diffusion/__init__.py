"""The objective: random draws, corruption, batch plans, streams, losses, the sampler. Knows nothing of processes."""
