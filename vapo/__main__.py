"""The command ``vapo``, also as ``python -m vapo``."""

import re
import sys
from importlib.metadata import requires


def main() -> int:
    """Run the command line; a package of the trainer that is not installed is named in one sentence."""
    try:
        from vapo.cli import main as command

        return command()
    except ModuleNotFoundError as error:
        package = re.compile(rf"{error.name}\b.*extra == .train", re.IGNORECASE)
        if not any(package.match(requirement) for requirement in requires("vapo") or ()):
            raise
        print(f"vapo: the trainer needs {error.name}: pip install 'vapo[train]'", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
