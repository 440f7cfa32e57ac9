"""The command line: compose_config a config, checking every key of it, and running what it says."""
