def body(rank, wanted):
    print("in rank", rank)
    assert rank == wanted or wanted < 0


def test_passes(spawn, run_script, tmp_path):
    spawn(body, 2, -1)
    script = tmp_path / "script.py"
    script.write_text("import os; print('script', os.environ['RANK'])")
    assert run_script(script, world_size=2).outputs == ("script 0\n", "script 1\n")


def test_fails(spawn):
    spawn(body, 2, 0)
