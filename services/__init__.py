"""Paceline's deployable processes, one package each."""
