"""The command line: one thin file per verb, each imported only when it is called."""
