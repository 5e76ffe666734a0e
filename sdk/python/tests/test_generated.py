"""The modules for threads are those that generate.py makes."""

import pathlib
import subprocess
import sys
import unittest



class Generated(unittest.TestCase):
    def test_current(self) -> None:
        here = pathlib.Path(__file__).parent.parent
        self.assertEqual(subprocess.run([sys.executable, here / "generate.py", "--check"]).returncode, 0)
