"""Run the tutorials and put their pictures, in few colours, where the site shows them.

`python docs/draw_pictures.py [NAME ...]`; what each prints is printed too, for its page.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
PICTURES = ROOT / "docs" / "images" / "tutorials"
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
            for picture in sorted(Path(folder).glob("*.png")):
                with Image.open(picture) as drawn:
                    few = drawn.convert("RGB").quantize(NUM_COLOURS, dither=Image.Dither.NONE)
                    few.save(PICTURES / picture.name, optimize=True)


if __name__ == "__main__":
    main(sys.argv[1:])
