"""Makes the modules for threads from those for asyncio: python3 generate.py. With --check, says whether they are current."""

import pathlib
import re
import sys

WORDS = [
    (r"\basync (def|with|for)\b", r"\1"),
    (r"\bawait ", ""),
    (r"\b__a(iter|enter|exit)__\b", r"__\1__"),
    (r"\b__anext__\b", "__next__"),
    (r"\banext\(", "next("),
    (r"\bStopAsyncIteration\b", "StopIteration"),
    (r"\bAsync(Iterator|Iterable)\b", r"\1"),
    (r"\bAsync(?=[A-Z])", ""),
    (r"\b_aio\b", "_sio"),
    (r"\b_(http|client|process)_async\b", r"_\1_sync"),
    (r"\baclose\b", "close"),
    (r"\bIsolatedAsyncioTestCase\b", "TestCase"),
    (r"\basync(SetUp|TearDown)\b", lambda m: m[1][0].lower() + m[1][1:]),
]


HERE = pathlib.Path(__file__).parent
FILES = {f"src/drowse/_{name}_async.py": f"src/drowse/_{name}_sync.py" for name in ("http", "process", "client")}
FILES["tests/test_async.py"] = "tests/test_sync.py"


def made(source: str) -> str:
    text = (HERE / source).read_text()
    for was, now in WORDS:
        text = re.sub(was, now, text)
    return f"# Made from {pathlib.Path(source).name} by generate.py.\n{text}"


def main() -> int:
    stale = [to for source, to in FILES.items() if not (HERE / to).exists() or (HERE / to).read_text() != made(source)]
    if "--check" in sys.argv:
        for to in stale:
            print(f"{to} is not current: run generate.py", file=sys.stderr)
        return 1 if stale else 0
    for source, to in FILES.items():
        (HERE / to).write_text(made(source))
    return 0


if __name__ == "__main__":
    sys.exit(main())
