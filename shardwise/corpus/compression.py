"""Bits per byte of the compressors everybody knows: what a model's loss on the same text is held against."""

import lzma
import zlib

SAMPLE = 8 << 20  # bytes compressed at most: as far as xz -6 looks back; more would only take longer


class Compression:
    """gzip -9 and xz -6 of a text that comes in pieces, of its first 8 MiB at most."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._gzip = zlib.compressobj(9, wbits=31)
        self._xz = lzma.LZMACompressor(preset=6)
        self._sizes = [0, 0]

    def add(self, text: bytes) -> None:
        """The next piece."""
        text = text[: SAMPLE - self.num_bytes]
        self.num_bytes += len(text)
        self._sizes[0] += len(self._gzip.compress(text))
        self._sizes[1] += len(self._xz.compress(text))

    def finish(self) -> dict[str, float]:
        """Bits per byte by compressor. Some text must have come."""
        assert self.num_bytes
        gzip_size = self._sizes[0] + len(self._gzip.flush())
        xz_size = self._sizes[1] + len(self._xz.flush())
        return {"gzip": 8.0 * gzip_size / self.num_bytes, "xz": 8.0 * xz_size / self.num_bytes}
