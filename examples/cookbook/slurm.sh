#!/bin/bash
# All tests on two nodes with four GPUs each: sbatch examples/cookbook/slurm.sh
#SBATCH --job-name=tests
#SBATCH --nodes=2
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=16
#SBATCH --time=00:30:00

# One queue for both nodes; each test runs on one of them. The project is on a shared file system.
source .venv/bin/activate
torchtest --cluster slurm --retries 1 --junitxml report.xml --html report.html
