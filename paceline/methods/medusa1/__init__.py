"""The medusa1 method: how it drafts, how it is trained, its public layouts."""
