from pathlib import Path

from torch_testing_ext.ranks import run_script


def test_script(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text("import os\nif os.environ['RANK'] == '1':\n    raise SystemExit('no data')\n")
    run_script(script, world_size=2)
