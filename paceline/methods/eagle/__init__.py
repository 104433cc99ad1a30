"""What EAGLE-1, EAGLE-2 and EAGLE-3 share."""
