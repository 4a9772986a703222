"""A packed page unpacks to the page it was made of, in Python and where there is one in JavaScript."""

import re
import shutil
import subprocess

import pytest

from scripts import pack_page

PAGE = '<!doctype html>\n<p>Übertragung & "quotes" </script> %s\n' * 50


def test_what_is_packed_comes_back():
    packed = pack_page.pack(PAGE)
    assert len(packed) < len(PAGE)
    assert pack_page.unpack(packed) == PAGE


def test_another_page_is_refused():
    with pytest.raises(ValueError, match=r"a page made by scripts/pack_page\.py is required"):
        pack_page.unpack(PAGE)


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_its_script_shows_the_page():
    (script,) = re.findall("<script>(.*)</script>\n$", pack_page.pack(PAGE), re.DOTALL)
    stub = "let out = ''; const document = {open() {}, close() { process.stdout.write(out); }, write(x) { out += x; }};"
    done = subprocess.run(["node", "-e", stub + script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, PAGE), done.stderr
