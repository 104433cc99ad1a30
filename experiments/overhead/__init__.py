"""What lies between two passes of a target, by stage: `paceline bench overhead`."""
