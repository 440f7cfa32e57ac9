"""Models written for other libraries, as tasks."""
