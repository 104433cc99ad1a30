"""Keys and values: slots, the cache that hands them out, and prefixes that are kept."""
