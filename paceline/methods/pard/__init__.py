"""What PARD and PARD-2 share: drafting and training with mask tokens, their checkpoints and their public layout."""
