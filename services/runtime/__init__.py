"""Process plumbing that all services use; it depends on none of them."""
