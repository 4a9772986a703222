"""Find the first module of a Flax model that diverges from a PyTorch model or its captured activations.

python scripts/bisect.py --flax FACTORY --golden FILE|FACTORY --names FILE [--only PATH] [--memory 2G] --out DIR

FACTORY is package.module:name or file.py:name. A names file that does not exist is drafted from both models.
Exit code: 0 no module diverges, 1 one does or an end-to-end check fails, 2 nothing was compared or the input cannot be
used.
"""

if __name__ == "bisect":  # a script of this folder imported the standard library's module of the same name
    import importlib.util
    import os
    import sys

    _path = os.path.join(os.path.dirname(os.__file__), "bisect.py")
    _spec = importlib.util.spec_from_file_location("bisect", _path)
    sys.modules["bisect"] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules["bisect"])
else:
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

    from scripts._bisection.command import main

    if __name__ == "__main__":
        raise SystemExit(main())
