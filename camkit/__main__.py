"""``python -m camkit`` is the same as ``camkit``."""

import sys

from camkit.cli import main

sys.exit(main())
