"""A real drafter behind an emulated link, beside plain decoding: `paceline bench distance`."""
