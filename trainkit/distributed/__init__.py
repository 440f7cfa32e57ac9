"""What ranks say to each other: collectives, and the store of failures."""
