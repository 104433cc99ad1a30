"""The deepseek_mtp method: how it drafts, how it is trained, its public layouts."""
