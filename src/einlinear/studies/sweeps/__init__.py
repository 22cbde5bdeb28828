"""Many runs: what a study lists, who runs what, and how it survives."""
