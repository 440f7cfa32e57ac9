"""Plan: the stages of a graph, and what a schedule makes of them."""
