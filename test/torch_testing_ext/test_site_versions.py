"""docs/tools/site_versions.py chooses the versions of the site, and writes the switch between them."""

import json
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs" / "tools"))
try:
    import site_versions
finally:
    sys.path.pop(0)


class VersionsTest(unittest.TestCase):
    def test_the_newest_of_each_minor(self):
        tags = ["v0.9.0", "v0.10.0", "v0.10.2", "v0.10.10", "v1.0.0", "v1.0.0rc1", "nightly", "v2"]
        self.assertEqual(
            [*site_versions.versions(tags).items()],
            [("1.0", "v1.0.0"), ("0.10", "v0.10.10"), ("0.9", "v0.9.0"), ("dev", "HEAD")],
        )

    def test_before_the_first_release(self):
        self.assertEqual(site_versions.versions([]), {"dev": "HEAD"})

    def test_the_switch(self):
        for names in (["1.0", "0.9", "dev"], ["dev"]):
            with self.subTest(names=names), tempfile.TemporaryDirectory() as folder:
                site_versions.write_switch(Path(folder), names)
                entries = json.loads(Path(folder, "versions.json").read_text(encoding="utf-8"))
                self.assertEqual([entry["version"] for entry in entries], names)
                self.assertEqual([entry["version"] for entry in entries if "latest" in entry["aliases"]], names[:1])
                page = Path(folder, "index.html").read_text(encoding="utf-8")
                self.assertIn(f"url={names[0]}/", page)
                self.assertIn(f'href="{names[0]}/"', page)

    def test_the_theme_has_the_switch(self):
        """It reads versions.json beside the folder of its version, if it has this provider."""
        self.assertRegex(
            (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), r"(?m)^extra:\n  version:\n    provider: mike$"
        )


if __name__ == "__main__":
    unittest.main()
