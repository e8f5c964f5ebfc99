"""Packaging of the distribution ``vapo``: the ops (`vapo_kernels`) and the trainer (`vapo`)."""

from pathlib import Path

from setuptools import find_packages, setup

setup(
    name="vapo",
    version="0.1.0",
    description="Fused Triton ops and a thin trainer for value-based policy optimisation of language models",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_packages(include=["vapo", "vapo.*", "vapo_kernels", "vapo_kernels.*"]),
    python_requires=">=3.10",
    # The ops and the adapters of `vapo.integrations` need no more; the trainer is the extra `train`.
    install_requires=["torch>=2.8", 'triton>=3.4; platform_system == "Linux"', "numpy"],
    extras_require={
        "train": [
            *("transformers>=5.16,<5.40", "tokenizers", "safetensors"),
            *("pydantic>=2.12", "pyyaml", "tyro", "rich", "matplotlib"),
        ],
        "flash": ["flash-attn"],
        "vllm": ["vllm"],
        "tasks": ["pyarrow", "reasoning-gym", "math-verify"],
        "track": ["trackio", "tensorboard", "wandb"],
        "smoke": ["gguf", "accelerate"],
        "bench": ["pytest-benchmark", "trl", "liger-kernel"],
        # What verl 0.9.1 and TRL 1.16 import on a CPU; they themselves are installed without dependencies.
        "integrations": [
            *("pytest", "accelerate", "cachetools", "codetiming", "datasets", "fastapi", "hydra-core", "omegaconf"),
            *("packaging", "peft", "pillow", "ray", "tensordict", "torchdata", "TransferQueue", "uvicorn"),
            "transformers",
        ],
        "dev": [
            # psutil: continuous batching on a CPU asks it for the memory.
            *("pytest", "pytest-xdist", "hypothesis", "ruff", "psutil"),
            *("pyarrow", "reasoning-gym", "math-verify", "tensorboard"),
        ],
    },
    entry_points={
        "console_scripts": ["vapo = vapo.__main__:main"],
        "verl.plugins": ["vapo = vapo.integrations.verl"],
    },
)
