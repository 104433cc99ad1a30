"""The p_eagle method: how it drafts, how it is trained, its public layouts."""
