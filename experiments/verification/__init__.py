"""What verification costs beside a step of the target."""
