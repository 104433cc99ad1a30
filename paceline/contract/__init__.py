"""What all parts agree on: errors, limits, field checks and the policy."""
