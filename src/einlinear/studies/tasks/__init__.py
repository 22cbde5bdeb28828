"""Tasks: what models are trained on, each a pure function of step and seed."""
