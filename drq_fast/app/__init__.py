"""The `drq-fast` command: options, commands, run folders, vectors in files and reports."""
