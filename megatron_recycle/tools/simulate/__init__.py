"""The simulator: what a job would have done through a failure trace, by our decisions and by others' rules."""
