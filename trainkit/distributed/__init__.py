"""Distributed runs: launchers, collectives, rendezvous, the failure store and the logs of ranks."""
