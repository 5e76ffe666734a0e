"""The program of the README runs."""

import os
import pathlib
import re
import unittest

URL = os.environ.get("DROWSE_URL", "")


@unittest.skipUnless(URL, "there is no server: make test-sdk")
class Readme(unittest.TestCase):
    def test_program(self) -> None:
        text = (pathlib.Path(__file__).parent.parent / "README.md").read_text()
        (program,) = re.findall(r"```python\n(.*?)```", text, re.S)
        program = program.replace('"http://127.0.0.1:7300", token="drowse_…"', "").replace("python:3.12", "test")
        said: list[str] = []
        exec(compile(program, "README.md", "exec"), {"print": lambda *words: said.append(" ".join(map(str, words)))})
        self.assertEqual(said[0], "hello\n")
        self.assertIn("stdout b'one line\\n'", said)
        self.assertEqual(sum("print('hello')" in line for line in said), 3)
