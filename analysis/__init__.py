"""Tables, figures and reports: what papers claim, beside what a replay on equal terms gives."""
