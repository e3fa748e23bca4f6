"""The package and what it needs; tools/missing_packages.py reads the same lists."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "megatron_dllm" / "__init__.py").read_text()).group(1)

REQUIREMENTS = [
    "torch>=2.11.0a0",  # containers carry pre-releases, which a plain >=2.11 would refuse
    "transformers>=5.17",
    "einops>=0.8",
    "jinja2>=3.1",
    "matplotlib>=3.8",
    "numpy>=1.26",
    "pillow>=10",
    "pyarrow>=16",
    "pyyaml>=6",
    "rich>=13.7",
    "safetensors>=0.5",
    "tensorboard>=2.16",
]
EXTRAS = {
    "fla": ["flash-linear-attention>=0.6.0"],
    "flashinfer": ["flashinfer-python>=0.6.18"],
    "dev": ["peft>=0.18", "pytest>=8.4", "pytest-timeout>=2.3", "ruff>=0.12"],
}

setup(
    name="megatron_dllm",
    version=VERSION,
    description="Training of block-diffusion mixture-of-experts language models, DiffusionGemma first",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=find_packages(include=["megatron_dllm*"]),
    install_requires=REQUIREMENTS,
    extras_require=EXTRAS,
)
