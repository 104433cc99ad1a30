"""Process plumbing that all services share; knows nothing of any one of them."""
