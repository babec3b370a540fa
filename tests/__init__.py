"""Tests, in folders as the packages that they test.

Where a public report of another project stands behind a test, its docstring says so: "Seen in owner/name#number" is an
issue or a pull request of that repository on GitHub. What it says of the fault is our wording.
"""
