"""Ready-made tasks and data: one Python file and one YAML file for each recipe."""
