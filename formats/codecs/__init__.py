"""One file, one on-disk layout; ``formats.codec`` finds them."""

from formats.codec import codec_names, get_codec

__all__ = ["codec_names", "get_codec"]
