"""Where install_chromium.sh gets Chromium, with stand-ins for every program that would download it."""

import shutil
import subprocess

import pytest
from helpers import ROOT

BASH = shutil.which("bash")
LOUD = "NO CHROMIUM"


@pytest.fixture
def install(tmp_path):
    """A function that runs the script where only the given programs exist, and returns their calls and its messages."""

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


def test_install_chromium_uses_an_installed_chromium(install):
    assert install(chromium="", id=ROOT_USER, apt_get="", playwright="") == ([], "")


def test_install_chromium_uses_apt_as_root(install):
    assert install(id=ROOT_USER, apt_get="", playwright="") == (APT, "")


def test_install_chromium_uses_playwright_as_another_user(install):
    assert install(id=ORDINARY_USER, apt_get="", playwright="") == (PLAYWRIGHT, "")


def test_install_chromium_uses_playwright_without_apt(install):
    assert install(id=ROOT_USER, playwright="") == (PLAYWRIGHT, "")


def test_install_chromium_uses_playwright_after_apt_failed(install):
    assert install(id=ROOT_USER, apt_get="exit 1", playwright="") == ([APT[0], *PLAYWRIGHT], "")


def test_install_chromium_warns_and_succeeds_without_either(install):
    called, messages = install(id=ROOT_USER, apt_get="exit 1", playwright="exit 1")
    assert called == [APT[0], *PLAYWRIGHT] and messages.count("\n") == 1 and LOUD in messages
