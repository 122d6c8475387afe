"""What the numbers of quantized checkpoints mean, one file for each format; who multiplies them is a plugin's part."""
