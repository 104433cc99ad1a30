"""Plain, co-located and separate decoding measured in one run, with `transformers.generate` beside them."""
