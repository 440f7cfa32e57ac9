"""The optional packages, and the extra that brings each."""

from __future__ import annotations

EXTRAS = {
    "sklearn": "recipes",
    "matplotlib": "plots",
    "transformers": "transformers",
    "torchmetrics": "metrics",
    "safetensors": "safetensors",
    "ray": "ray",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "PIL": "images",
    "datasets": "huggingface",
    "tokenizers": "huggingface",
    "peft": "huggingface",
    "lightning": "lightning",
    "hydra_joblib_launcher": "sweeps",
    "hydra_optuna_sweeper": "sweeps",
    "hydra_submitit_launcher": "slurm",
}


def remedy(package: str) -> str:
    """Return what to type to have the package `package`, named as it is imported."""
    top = package.partition(".")[0]
    if top in EXTRAS:
        return f"Type: pip install 'trainkit[{EXTRAS[top]}]'"
    return f"If it is yours, start from the folder that holds it; else: pip install {top}"
