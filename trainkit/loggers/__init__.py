"""Where logged values are written to: one file for each destination."""
