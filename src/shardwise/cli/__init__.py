"""The command line: verbs and options only; every verb imports its own work when it runs."""
