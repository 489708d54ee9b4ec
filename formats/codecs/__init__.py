"""One file, one on-disk layout; ``formats.codec`` finds them."""
