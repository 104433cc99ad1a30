"""What the planner costs, and step traces to replay it on."""
