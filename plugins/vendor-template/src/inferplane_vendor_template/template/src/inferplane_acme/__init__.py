"""InferPlane platform for Acme devices."""
