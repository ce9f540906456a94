"""Package definition; tool settings (ruff, mypy, pytest) are in pyproject.toml."""

from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
UI = ["rich>=13"]
UPSTREAM = ["libcst>=1.4"]
DEV = ["pytest>=7.4", "pytest-xdist>=3.3", "numpy", "ruff", "mypy", *UI, *UPSTREAM]

setup(
    name="torch-testing-ext",
    version="0.1.0",
    description="Test kit for torch.distributed: fresh ranks in milliseconds, verdicts that count every rank",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="BSD-3-Clause",
    license_files=["LICENSE"],
    packages=find_packages(include=["torch_testing_ext", "torch_testing_ext.*"]),
    package_data={"torch_testing_ext": ["py.typed", "runner/report/page/*"]},
    python_requires=">=3.10",
    install_requires=["torch>=2.11", "expecttest", "hypothesis"],
    extras_require={"test": DEV, "ui": UI, "upstream": UPSTREAM},
    classifiers=[
        "Framework :: Pytest",
        "Intended Audience :: Developers",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3 :: Only",
        "Topic :: Software Development :: Testing",
        "Typing :: Typed",
    ],
)
