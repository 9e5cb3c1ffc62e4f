"""Where the browser of the browser tests comes from, with stand-ins for every program that would fetch one."""

import shutil
import subprocess

import pytest
from helpers import ROOT

BASH = shutil.which("bash")
LOUD = "NO CHROMIUM"


@pytest.fixture
def install(tmp_path):
    """Runs the script where only the given programs exist; returns what they were called with, and its messages."""

    def run(**programs: str) -> tuple[list[str], str]:
        calls = tmp_path / "calls"
        calls.touch()
        for name, body in programs.items():
            program = tmp_path / name.replace("_", "-")
            program.write_text(f'#!{BASH}\necho "${{0##*/}} $@" >> {calls}\n{body}\n')
            program.chmod(0o755)
        script = [BASH, str(ROOT / "tests" / "install_chromium.sh")]
        result = subprocess.run(script, env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=True)
        called = [line for line in calls.read_text().splitlines() if not line.startswith("id ")]
        return called, result.stderr

    return run


ROOT_USER, ORDINARY_USER = "echo 0", "echo 1000"
APT = ["apt-get update -qq", "apt-get install -y -qq --no-install-recommends chromium"]
PLAYWRIGHT = ["playwright install chromium"]


def test_one_that_is_there_is_used(install):
    assert install(chromium="", id=ROOT_USER, apt_get="", playwright="") == ([], "")


def test_root_takes_debian_s(install):
    assert install(id=ROOT_USER, apt_get="", playwright="") == (APT, "")


def test_others_take_playwright_s(install):
    assert install(id=ORDINARY_USER, apt_get="", playwright="") == (PLAYWRIGHT, "")


def test_so_does_root_where_there_is_no_apt(install):
    assert install(id=ROOT_USER, playwright="") == (PLAYWRIGHT, "")


def test_playwright_is_tried_where_apt_fails(install):
    assert install(id=ROOT_USER, apt_get="exit 1", playwright="") == ([APT[0], *PLAYWRIGHT], "")


def test_without_either_it_says_so_and_goes_on(install):
    called, messages = install(id=ROOT_USER, apt_get="exit 1", playwright="exit 1")
    assert called == [APT[0], *PLAYWRIGHT] and messages.count("\n") == 1 and LOUD in messages
