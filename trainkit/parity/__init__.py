"""Parity: proof that strategies train to the same weights."""
