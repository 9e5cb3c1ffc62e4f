"""Take the pictures of docs/demo.md from a running page: `python docs/screenshots.py http://127.0.0.1:7860`."""

import io
import shutil
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

SIZES = {1280: 900, 390: 844}  # width and height in pixels of a desktop and a telephone


def main(address: str) -> None:
    """Press Run in both tabs at each size, and save the pictures beside this file."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for width, height in SIZES.items():
            page = browser.new_page(viewport={"width": width, "height": height}, color_scheme="light")
            page.goto(address)
            for tab in ("Greedy", "Sampled"):
                page.get_by_role("tab", name=tab).click()
                page.get_by_role("button", name="Run", exact=True).locator("visible=true").click()
                page.locator(".tree svg:visible").wait_for(timeout=300_000)
                page.wait_for_timeout(500)  # milliseconds, until the focus ring has faded
                picture = Image.open(io.BytesIO(page.screenshot(full_page=True)))
                path = Path(__file__).with_name(f"demo-{tab.lower()}-{width}.png")
                picture.convert("RGB").quantize(128).save(path, optimize=True)
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1])
