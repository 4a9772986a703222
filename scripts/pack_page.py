"""Pack an HTML page into a small one that unpacks itself in the browser, for reports that are kept in the repository.

python scripts/pack_page.py report/report.html docs/results/NAME.html

The packed page is one file without network as well, but needs scripts and a browser of 2023 or later.
"""

import argparse
import base64
import gzip
from pathlib import Path

_PAGE = """<!doctype html>
<meta charset="utf-8">
<title>jaxattn</title>
<noscript>This page is packed: it needs scripts, or <code>scripts/pack_page.py --unpack</code>.</noscript>
<script>
const packed = "%s";
const bytes = Uint8Array.from(atob(packed), (c) => c.charCodeAt(0));
const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
new Response(stream).text().then((page) => { document.open(); document.write(page); document.close(); });
</script>
"""
_START, _END = 'const packed = "', '";'


def pack(page: str) -> str:
    """A page that shows this one."""
    return _PAGE % base64.b64encode(gzip.compress(page.encode(), mtime=0)).decode()


def unpack(page: str) -> str:
    """The page that was packed.

    Raises:
        ValueError: it is not a packed page.
    """
    start = page.find(_START)
    if start < 0:
        raise ValueError("a page made by scripts/pack_page.py is required, this one holds no packed page")
    start += len(_START)
    return gzip.decompress(base64.b64decode(page[start : page.index(_END, start)])).decode()


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("page", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--unpack", action="store_true", help="the other way round")
    args = parser.parse_args()
    text = args.page.read_text("utf-8")
    args.out.write_text(unpack(text) if args.unpack else pack(text), "utf-8")


if __name__ == "__main__":
    main()
