"""Real devices: a federation's keys and folders, its server, its nodes, and what can be wrong with either."""
