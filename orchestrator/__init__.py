"""The Ray orchestrator: a director that admits and places, and a conductor for each verifier."""
