"""What InferPlane platforms have in common whose device torch has a module for."""
