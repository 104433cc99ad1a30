"""The eagle2 method: how it drafts, how it is trained, its public layouts."""
