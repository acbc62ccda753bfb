"""Run the tutorials and put their pictures, in few colours, where the site shows them; also those of
`results/paper` and `results/figure-2`.

Of the latter there are more than the pages show, and the others are left out.

`python docs/draw_pictures.py [NAME ...]`, with `paper` for the latter; what each prints is printed too, for its page.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

from varlap.report.reproduction import write_reproduction

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"
PAPER = "paper"
NUM_COLOURS = 128


def main(names: list[str]) -> None:
    """Draw the pictures of these tutorials, or of all."""
    for script in sorted((ROOT / "examples" / "tutorials").glob("*.py")):
        if names and script.stem not in names:
            continue
        print(f"== {script.stem}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            environment = os.environ | {"MPLBACKEND": "agg"}
            subprocess.run([sys.executable, str(script)], cwd=folder, env=environment, check=True)
            _keep(Path(folder), IMAGES / "tutorials")
    if not names or PAPER in names:
        print(f"== {PAPER}", flush=True)
        pages = "".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
        for store in (PAPER, "figure-2"):
            with tempfile.TemporaryDirectory() as folder:
                write_reproduction(ROOT / "results" / store, folder)
                figures = Path(folder) / "figures"
                for picture in figures.glob("*.png"):
                    if picture.name not in pages:
                        picture.unlink()
                _keep(figures, IMAGES / PAPER)


def _keep(drawn_in: Path, shown_from: Path) -> None:
    shown_from.mkdir(exist_ok=True)
    for picture in sorted(drawn_in.glob("*.png")):
        with Image.open(picture) as drawn:
            few = drawn.convert("RGB").quantize(NUM_COLOURS, dither=Image.Dither.NONE)
            few.save(shown_from / picture.name, optimize=True)


if __name__ == "__main__":
    main(sys.argv[1:])
