"""``python -m vapo`` is the command ``vapo``."""

import sys

from vapo.cli import main

sys.exit(main())
