"""What drafting ahead costs and brings: acceptance on a drafter's own states, and how often an outcome is foretold."""
