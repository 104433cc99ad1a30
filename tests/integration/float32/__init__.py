"""Tests on two deployments that they share, in float32."""
