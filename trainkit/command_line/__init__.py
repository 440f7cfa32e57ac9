"""The command line: composing a config, checking every key of it, and running what it says."""
