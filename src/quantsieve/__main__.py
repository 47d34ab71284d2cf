"""`python -m quantsieve`."""

from quantsieve.cli import main

raise SystemExit(main())
