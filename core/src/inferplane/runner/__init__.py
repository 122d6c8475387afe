"""One rank's model at work: the persistent batch, the forward pass, and the sampler."""
