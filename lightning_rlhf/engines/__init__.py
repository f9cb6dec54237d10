"""Back ends that update one model, each behind ``BaseEngine``."""
