"""InferPlane platform for Kestrel cards, which are simulated: a torch device with memory of its own."""
