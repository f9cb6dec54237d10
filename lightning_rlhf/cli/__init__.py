"""The command line: ``lightning-rlhf``."""
