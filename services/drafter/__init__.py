"""The drafter process."""
