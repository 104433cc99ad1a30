"""Tests on two deployments that they share, in the dtype that is fastest here."""
